"""The methods of a sharded module that make room on the device between steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from .arguments import check_flag
from .memory.host_copies import ALL_KINDS, Kind
from .runtime.context import Context
from .runtime.offloading import OffloadReport, check_between_passes, free_gathered, offload
from .runtime.unit import Unit


class OffloadMethods:
    """Move what a module holds between steps to the CPU and back."""

    def _context(self) -> Context:
        raise NotImplementedError

    def _units(self) -> list[Unit]:
        raise NotImplementedError

    def offload_to_cpu(
        self,
        max_cpu_bytes: int | None = None,
        *,
        pin_memory: bool = True,
        kinds: Iterable[str] = ALL_KINDS,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
    ) -> OffloadReport:
        """Move this module's weights, gradients and optimizer state to CPU memory and free what they had on the device.

        Parameters, gradients and optimizer state stay the objects that they are. What needs them brings them back by
        itself: forward and backward, ``unshard``, optimizer steps, ``finish_grad_sync``, clipping, state dicts and
        checkpoints. Any other access to their data raises until ``reload_to_gpu``. A second call moves what came back
        or is new. Call it on all ranks; each may have a budget of its own. Buffers and ignored parameters stay.

        Args:
            max_cpu_bytes: how much of this module may be in CPU memory on this rank. The largest pieces are moved
                first, and those that don't fit are left. None: everything.
            pin_memory: page-lock the CPU memory, which makes copies faster; without effect where weights are on the
                CPU anyway.
            kinds: of ``compute_weights`` (and weights that are both computed with and stepped), ``main_weights``,
                ``main_gradients`` (and those whose reduction is put off) and ``optimizer_state``.
            optimizer: one or several whose state moves too, beside those that stepped the module's parameters before.

        Raises:
            TypeError, ValueError: an argument has the wrong type or value.
            RuntimeError: a forward or backward isn't over, or gradients are being reduced; names the unit.
        """
        chosen = _kinds(kinds)
        check_flag("pin_memory", pin_memory)
        _check_budget(max_cpu_bytes)
        optimizers = _optimizers(optimizer)
        return offload(self._context(), self._units(), optimizers, chosen, max_cpu_bytes, pin_memory)

    def reload_to_gpu(self) -> None:
        """Bring back what ``offload_to_cpu`` moved. Without effect if nothing is in CPU memory."""
        for unit in self._units():
            unit.host_copies.give_back()

    def release_memory_pool(self) -> None:
        """Free gathered weights that were kept and all memory that is held for later use, of the whole root.

        It's taken again when it's needed.

        Raises:
            RuntimeError: a forward or backward isn't over, or gradients are being reduced; names the unit.
        """
        context = self._context()
        check_between_passes(context)
        free_gathered(context, context.units)
        context.streams.synchronize()
        context.allocator.release()
        context.streams.release_cached_memory()


def _kinds(kinds: object) -> list[Kind]:
    known = ", ".join(Kind)
    # A string is an iterable of its letters.
    if isinstance(kinds, str) or not isinstance(kinds, Iterable):
        raise TypeError(f"kinds must be several of {known}, got {kinds!r}")
    found = list(kinds)
    for kind in found:
        if kind not in ALL_KINDS:
            raise ValueError(f"kinds must be of {known}, got {kind!r}")
    if not found:
        raise ValueError(f"kinds is empty; give some of {known}")
    return [Kind(kind) for kind in found]


def _check_budget(max_cpu_bytes: object) -> None:
    if max_cpu_bytes is None:
        return
    if isinstance(max_cpu_bytes, bool) or not isinstance(max_cpu_bytes, int):
        raise TypeError(f"max_cpu_bytes must be a whole number of bytes or None, got {max_cpu_bytes!r}")
    if max_cpu_bytes < 0:
        raise ValueError(f"max_cpu_bytes must be at least 0, got {max_cpu_bytes!r}")


def _optimizers(given: object) -> list[Optimizer]:
    found: list[Optimizer] = []
    for optimizer in () if given is None else given if isinstance(given, (list, tuple)) else (given,):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer, several or None, got {type(optimizer).__name__}")
        found.append(optimizer)
    return found
