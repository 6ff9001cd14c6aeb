"""What of a root's memory moves to the CPU between steps, and when that is possible."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..memory.host_copies import Kind
from .context import Context
from .trees import tensors_in
from .unit import Phase, Unit


@dataclass(frozen=True)
class OffloadReport:
    """What of a module is in CPU memory after ``offload_to_cpu``, in bytes of this rank.

    Attributes:
        offloaded_bytes: in CPU memory now, whichever call moved it.
        skipped_bytes: of the kinds asked for, still in memory of the device, for want of room in the budget.
        per_kind: ``offloaded_bytes`` by kind.
    """

    offloaded_bytes: int
    skipped_bytes: int
    per_kind: dict[str, int]


class _Candidate(NamedTuple):
    unit: Unit
    kind: Kind
    storage: torch.UntypedStorage


def offload(
    context: Context,
    units: Sequence[Unit],
    optimizers: Collection[Optimizer],
    kinds: Collection[Kind],
    max_cpu_bytes: int | None,
    pin_memory: bool,
) -> OffloadReport:
    """Move memory of ``kinds`` to the CPU, largest first, as long as no more than ``max_cpu_bytes`` of it are there.

    Raises:
        RuntimeError: a pass isn't over.
    """
    check_between_passes(context)
    if Kind.COMPUTE_WEIGHTS in kinds:
        free_gathered(context, units)
    context.streams.synchronize()
    optimizers = list({*optimizers, *context.steppers})
    room = None if max_cpu_bytes is None else max_cpu_bytes - sum(_held(units).values())
    skipped = 0
    candidates = sorted(_candidates(units, optimizers, kinds), key=lambda found: -found.storage.nbytes())
    for unit, kind, storage in candidates:
        size = storage.nbytes()
        if not storage.resizable() or (room is not None and size > room):
            skipped += size
            continue
        unit.host_copies.take(kind, storage, unit.name, pin_memory and unit.device.type != "cpu")
        room = None if room is None else room - size
    if Kind.OPTIMIZER_STATE in kinds:
        for optimizer in optimizers:
            _watch_state_dicts(context, optimizer)
    context.streams.release_cached_memory()
    held = _held(units)
    return OffloadReport(sum(held.values()), skipped, held)


def check_between_passes(context: Context) -> None:
    """Refuse to go on while weights or gradients are in use.

    Raises:
        RuntimeError: names the unit, and what to do first.
    """
    context.clear_failed_backward()
    for unit in context.units:
        if unit.phase is Phase.FORWARD:
            raise RuntimeError(f"unit {unit.name!r} is in its forward; move memory between steps")
        if unit.phase is Phase.BACKWARD or context.backward_open:
            raise RuntimeError(f"a backward through unit {unit.name!r} runs; move memory between steps")
        if unit.is_bound:
            raise RuntimeError(
                f"unit {unit.name!r} shows its full weights, after a forward whose backward is still to come or after "
                "unshard(); run the backward or call reshard() on it, or reset_iter_state() on the root, before"
            )
    if context.has_reductions_in_flight:
        raise RuntimeError(
            f"gradients below unit {context.root.name!r} are being reduced; call finish_grad_sync() on it before"
        )


def free_gathered(context: Context, units: Sequence[Unit]) -> None:
    """Free weights that were kept gathered, or gathered ahead, for a later forward."""
    for unit in units:
        unit.reshard(context.streams)


def _candidates(
    units: Sequence[Unit], optimizers: Sequence[Optimizer], kinds: Collection[Kind]
) -> Iterator[_Candidate]:
    """Storages of ``kinds`` that have memory on the device, each once."""
    seen: set[int] = set()
    for unit in units:
        for kind, storage in [*_resting(unit), *_optimizer_state(unit, optimizers)]:
            if storage._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                if kind in kinds:
                    yield _Candidate(unit, kind, storage)


def _resting(unit: Unit) -> Iterator[tuple[Kind, torch.UntypedStorage]]:
    for group in unit.groups:
        yield from group.resting_storages()


def _optimizer_state(unit: Unit, optimizers: Sequence[Optimizer]) -> Iterator[tuple[Kind, torch.UntypedStorage]]:
    # Where main weights rest on the CPU the optimizer steps there, and its state is there already.
    params = [param for group in unit.groups if group.rest is None for param in group.sharded_params]
    for optimizer in optimizers:
        for param in params:
            for tensor in tensors_in(optimizer.state.get(param)):
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                if type(local) is torch.Tensor and local.device == unit.device:
                    yield Kind.OPTIMIZER_STATE, local.untyped_storage()


def _held(units: Sequence[Unit]) -> dict[str, int]:
    return {kind.value: sum([unit.host_copies.nbytes(kind) for unit in units]) for kind in Kind}


def _watch_state_dicts(context: Context, optimizer: Optimizer) -> None:
    """Bring the state back before the optimizer's state dict is made or loaded."""
    if optimizer not in context.watched:
        context.watched.add(optimizer)
        bring_back = _BringBack(context)
        optimizer.register_state_dict_pre_hook(bring_back)
        optimizer.register_load_state_dict_pre_hook(bring_back)


class _BringBack:
    """Hook of an optimizer, which doesn't keep the context alive."""

    def __init__(self, context: Context) -> None:
        self._context = weakref.ref(context)

    def __call__(self, optimizer: Optimizer, *unused: Any) -> None:
        context = self._context()
        if context is not None:
            context.bring_back(Kind.OPTIMIZER_STATE)
