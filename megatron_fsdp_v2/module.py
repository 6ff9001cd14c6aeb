"""FSDPModule: the methods a module gains from ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.nn as nn

from .arguments import check_flag, check_positive
from .memory.host_copies import Kind
from .offload_methods import OffloadMethods
from .refused import RefusedMethods
from .runtime.agreement import MODES, Mode
from .runtime.context import Context
from .runtime.hooks import ensure_context, run_forward
from .runtime.unit import Unit
from .sharding.gradients import GroupGradients


class UnshardHandle:
    """Returned by ``unshard(async_op=True)``."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the gather and put the full parameters into the module. Waiting twice is waiting once."""
        if self._unit is not None:
            self._unit.finish_unshard()
            self._unit.bind_unsharded()
            self._unit = None


class FSDPModule(OffloadMethods, RefusedMethods):
    """Mixed into the class of every module that ``fully_shard`` was called on.

    Methods with ``recurse`` act on the units below too, by default.
    """

    _fsdp_unit: Unit

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new module of the original class: containers make parts of themselves from their own class."""
        return unsharded_class(cls)(*args, **kwargs)  # type: ignore[arg-type]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Around the call rather than in hooks: what torch.compile made of the module is called inside.
        forward = super().__call__  # type: ignore[misc]
        return run_forward(self._fsdp_unit, named_units_of, self, forward, args, kwargs)  # type: ignore[arg-type]

    def lazy_init(self) -> None:
        """Make this module the root of the units below it, as its first forward would.

        Raises:
            RuntimeError: a unit below ran on its own before.
        """
        self._context()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's full parameters into the module, until ``reshard``.

        With ``async_op`` the gather is only started; ``wait`` of the returned handle finishes it.
        """
        context = self._context()
        context.streams.gather_after_compute()
        self._fsdp_unit.start_unshard(context.streams)
        handle = UnshardHandle(self._fsdp_unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Show this unit's sharded parameters and free the gathered weights."""
        context = self._fsdp_unit.context
        if context is not None:
            self._fsdp_unit.reshard(context.streams)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. If not they are kept, unreduced and whole, until one that does."""
        self._set("requires_gradient_sync", requires_gradient_sync, recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces along the outer axis of a 2-D mesh. If not the shard axis alone is reduced."""
        self._set("requires_all_reduce", requires_all_reduce, recurse)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether weights are freed after forward.

        If not they stay for backward or, after a forward without gradients, for the next one: evaluation and generation
        gather once. Weights that were updated since are gathered again.
        """
        self._set("reshard_after_forward", reshard_after_forward, recurse)
        self._set("keeps_weights", not reshard_after_forward, recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether weights are freed after backward; keeping them saves a gather for the next micro-batch."""
        self._set("reshard_after_backward", reshard_after_backward, recurse)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this unit's weights. An embedding's, for one, doesn't."""
        self._set("unshard_in_backward", unshard_in_backward, recurse=False)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether a unit whose backward gave none of its parameters a gradient reduces zeros, as other ranks may not.

        Where some parameters have one, the others always count as zero.
        """
        self._set("reduces_unused", reduce_scatter_unused_params, recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward of this root waits for its last reduction; without, ``.grad`` isn't final after it.

        The first optimizer step, ``zero_grad`` or later backward waits in any case.
        """
        self._set("is_last_backward", is_last_backward, recurse=False)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these modules' units ahead in this unit's forward, in place of the one that ran next the last time.

        Raises:
            TypeError: one of them isn't sharded.
        """
        self._fsdp_unit.forward_prefetch = _units_of("modules", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The same for this unit's backward."""
        self._fsdp_unit.backward_prefetch = _units_of("modules", modules)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks by ``factor``, in place of averaging. For this unit alone.

        Raises:
            TypeError: the factor isn't a number.
            ValueError: the factor isn't positive and finite.
        """
        check_positive("factor", factor)
        for gradients in _gradients([self._fsdp_unit]):
            gradients.set_reduction(average=False, divisor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's older name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether this unit's averages are made of a sum and a division, for communication that can't average."""
        check_flag("enable", enable)
        for gradients in _gradients([self._fsdp_unit]):
            gradients.set_sums_only(enable)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook`` on each flat piece of this unit's reduced gradients, in the communication dtype.

        It runs before they are added to the main gradients and may change them in place.

        Raises:
            ValueError: ``stream`` is given; the hook runs on the stream that reduced.
        """
        if not callable(hook):
            raise TypeError(f"hook must be a function, got {type(hook).__name__}")
        if stream is not None:
            raise ValueError("stream can't be chosen: the hook runs on the stream that reduced; switch inside the hook")
        for gradients in _gradients([self._fsdp_unit]):
            gradients.set_hook(hook)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's gathers wait for ``event`` rather than for all that the present stream was given."""
        self._fsdp_unit.post_optim_event = event

    def set_agreement_check(self, mode: Mode) -> None:
        """When this root compares with other ranks what each is about to do, to name the unit rather than hang.

        Args:
            mode: ``first_step`` (as if not called), ``always``, or ``never``. To be set before the first forward.

        Raises:
            ValueError: another mode.
            RuntimeError: the module ran already.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if self._fsdp_unit.context is not None:
            raise RuntimeError(f"unit {self._fsdp_unit.name!r} ran already; call set_agreement_check before")
        self._fsdp_unit.agreement_mode = mode

    def reset_iter_state(self) -> None:
        """After a forward or backward that raised: bring all units to rest; gradients not reduced yet are lost.

        The next pass does that by itself; here it's done at once, and gradients whose reduction was put off go too.
        """
        self._context().reset()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Mark micro-batches that aren't the last of their step.

        Strategies whose main gradients stay partial until the step (``no_shard``, ``optim``, and every outer axis) put
        their reduction off. ``optim_grads`` and ``optim_grads_params`` reduce-scatter every micro-batch all the same,
        since a whole gradient is what they are there to avoid. ``set_requires_gradient_sync`` puts off everything.
        """
        before = [(unit, unit.defers_partial_gradients) for unit in units_below(self)]
        self._set("defers_partial_gradients", True, recurse=True)
        try:
            yield
        finally:
            for unit, value in before:
                unit.defers_partial_gradients = value

    def finish_grad_sync(self, include_unused: bool = False) -> None:
        """Reduce every gradient whose reduction was put off; ``.grad`` is final afterwards. A collective.

        ``include_unused`` gives parameters that got no gradient since ``zero_grad`` one of zeros, on all ranks.
        """
        self._context().finish_grad_sync(include_unused)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of this module's parameters, and its gradients that wait for their reduction."""
        units = units_below(self)
        if self._fsdp_unit.context is not None:
            self._fsdp_unit.context.settle_gradients()
        for gradients in _gradients(units):
            gradients.drop_pending()
        # Between forward and backward a unit may show its full parameters, which have no gradient to clear.
        bound = [unit for unit in units if unit.is_bound]
        for unit in bound:
            unit.bind_sharded()
        super().zero_grad(set_to_none)  # type: ignore[misc]
        for unit in bound:
            unit.bind_unsharded()
        for gradients in _gradients(units):
            gradients.free_if_cleared()

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiply this module's gradients, put-off ones too, by ``factor`` (a number or 0-dim tensor)."""
        for unit in units_below(self):
            unit.host_copies.give_back([Kind.MAIN_GRADIENTS])
            for gradients in _gradients([unit]):
                gradients.scale(factor)

    def mark_weights_updated(self) -> None:
        """Declare that this module's parameters were written in a way that torch doesn't count.

        Operations on a parameter and steps of a torch optimizer are noticed; writes through ``.data``, raw pointers,
        collectives, or ``torch._foreach_`` functions outside an optimizer are not.
        """
        for unit in units_below(self):
            for group in unit.groups:
                group.mark_updated()

    def start_weight_gather(self) -> None:
        """Start gathering what the next forward needs first: stale replicated weights, or else the root's own."""
        context = self._context()
        context.streams.gather_after_compute()
        for unit in context.units:
            if unit is context.root or not any([group.gathers_per_use for group in unit.groups]):
                unit.start_unshard(context.streams)

    def _context(self) -> Context:
        unit = self._fsdp_unit
        return unit.context or ensure_context(unit, named_units_of(unit))

    def _units(self) -> list[Unit]:
        return units_below(self)

    def _set(self, name: str, value: bool, recurse: bool) -> None:
        check_flag(name, value)
        for unit in units_below(self) if recurse else [self._fsdp_unit]:
            setattr(unit, name, value)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``to()``, ``half()`` and the like: refused where they would detach parameters from their buffers."""
        units = units_below(self)
        for unit in units:
            for group in unit.groups:
                probe = group.main.pieces[0].detach()
                after = fn(probe)
                if after.dtype != probe.dtype or after.device != probe.device:
                    raise RuntimeError(
                        f"unit {unit.name!r} can't be moved from {probe.dtype} on {probe.device} to {after.dtype} on "
                        f"{after.device} after fully_shard: convert the module before it"
                    )
        _convert_unsharded(self, units, fn)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError("a module can't be deep-copied after fully_shard: copy it before, or load its state_dict")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError("a module can't be copied or pickled after fully_shard: save its state_dict")


def named_units(module: Any) -> list[tuple[str, Unit]]:
    """Units of a module and its submodules with their paths from it, in the order of ``modules()``."""
    found: dict[Unit, str] = {}
    for path, child in module.named_modules():
        if isinstance(child, FSDPModule):
            found.setdefault(child._fsdp_unit, path)
    return [(path, unit) for unit, path in found.items()]


def named_units_of(unit: Unit) -> list[tuple[str, Unit]]:
    """Units of all of a unit's modules, and below them, with their paths from there."""
    found: dict[Unit, str] = {}
    for module in unit.modules:
        for path, below in named_units(module):
            found.setdefault(below, path)
    return [(path, below) for below, path in found.items()]


def units_below(module: Any) -> list[Unit]:
    """Units of a module and its submodules, in the order of ``modules()``."""
    return [unit for _, unit in named_units(module)]


def _units_of(name: str, modules: object) -> tuple[Unit, ...]:
    if not isinstance(modules, Sequence):
        raise TypeError(f"{name} must be a list of sharded modules, got {type(modules).__name__}")
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise TypeError(f"{name} must hold sharded modules, got {type(module).__name__}; call fully_shard on it")
    return tuple(dict.fromkeys([module._fsdp_unit for module in modules]))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a sharded module than ``forward`` gather its weights too; a no-op for other modules.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"method_name {method_name!r}: {type(module).__name__} has no such method")

    @wraps(method)
    def with_weights(*args: Any, **kwargs: Any) -> Any:
        return run_forward(module._fsdp_unit, named_units_of, module, method, args, kwargs)

    setattr(module, method_name, with_weights)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Let several roots, such as the pipeline stages of a rank, use the communication streams of the first one.

    Raises:
        TypeError: one of them isn't sharded.
    """
    units = _units_of("modules", modules)
    contexts = [unit.context or ensure_context(unit, named_units_of(unit)) for unit in units]
    for context in contexts:
        context.streams = contexts[0].streams


def _gradients(units: list[Unit]) -> list[GroupGradients]:
    return [group.gradients for unit in units for group in unit.groups if group.gradients is not None]


def _convert_unsharded(module: Any, units: list[Unit], fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply a conversion to the buffers and ignored parameters of a module."""
    groups = [group for unit in units for group in unit.groups]
    owned = {id(param) for group in groups for param in [*group.sharded_params, *group.unsharded_params]}
    with torch.no_grad():
        for child in module.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None:
                    child._buffers[name] = fn(buffer)
            for param in child._parameters.values():
                if param is not None and id(param) not in owned:
                    param.data = fn(param.data)


def sharded_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``base`` that adds FSDPModule; made once per class."""
    existing: type[nn.Module] | None = base.__dict__.get("_fsdp_sharded_class")
    if existing is None:
        existing = type(f"FSDP{base.__name__}", (FSDPModule, base), {"__module__": base.__module__})
        setattr(base, "_fsdp_sharded_class", existing)  # noqa: B010 - the class has no such attribute to a checker
    return existing


def unsharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class a module had before ``fully_shard``."""
    return next(base for base in cls.__mro__ if issubclass(base, nn.Module) and not issubclass(base, FSDPModule))
