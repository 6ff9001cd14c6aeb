"""Turns "this module is about to run" into gathers, releases and reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from .context import Context, in_autograd_backward
from .streams import streams_for
from .trees import map_tensors, tensors_in
from .unit import Phase, Unit


def ensure_context(unit: Unit, named_units: list[tuple[str, Unit]]) -> Context:
    """Make ``unit`` the root of the units below it, unless it belongs to a root already; names units by their paths.

    Raises:
        RuntimeError: a unit below already has a root, because it ran on its own first.
    """
    if unit.context is None:
        taken = [path for path, other in named_units if other.context is not None]
        if taken:
            raise RuntimeError(
                f"unit {taken[0]!r} ran as a root before the module {unit.name!r} that contains it; "
                "run the outermost module first, or call lazy_init() on it"
            )
        for path, other in named_units:
            other.name = path or other.name
            if other.reshard_after_forward is None:
                # The root's backward follows its forward at once; freeing its weights in between saves nothing.
                other.reshard_after_forward = other is not unit
        # The first call may come from inside torch.compile, which would trace how a context is made.
        make = torch.compiler.disable(Context)
        context: Context = make(unit, [other for _, other in named_units], streams_for(unit.device))
        return context
    return unit.context


def run_forward(
    unit: Unit,
    named_units: Callable[[Unit], list[tuple[str, Unit]]],
    module: nn.Module,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Call ``forward``, which computes with the weights of ``unit`` and belongs to its ``module``.

    ``named_units`` lists the units at and below a unit with their paths, itself first.
    """
    if unit.phase is Phase.FORWARD and not unit.awaits(module):
        # A call from inside the module, or a second one before the rest of its unit ran: everything is in place.
        return forward(*args, **kwargs)
    context = unit.context or ensure_context(unit, named_units(unit))
    if in_autograd_backward():
        return _run_recomputation(unit, context, forward, args, kwargs)
    try:
        first = _before_forward(unit, context, module)
        args, kwargs = _prepare_inputs(unit, args, kwargs, marked=first)
        output = forward(*args, **kwargs)
        return _after_forward(unit, context, output)
    except BaseException:
        context.abandon_forward(unit)
        raise


def _before_forward(unit: Unit, context: Context, module: nn.Module) -> bool:
    """Gather the unit's weights; False if an earlier module of the unit had that done."""
    if unit.phase is Phase.FORWARD:
        unit.note_run(module)
        return False
    context.clear_failed_backward()
    if unit is context.root:
        context.begin_forward()
    unit.begin_forward(module)
    expected = None
    if context.in_root_forward:
        expected = context.forward_order.note(unit)
    else:
        # A module below the root runs alone: gathers must see what was written to its weights before.
        unit.check_parameters()
        context.streams.gather_after_compute()
    unit.forward_version = _make_ready(unit, context)
    context.prefetch(expected, unit.forward_prefetch)
    return True


def _after_forward(unit: Unit, context: Context, output: Any) -> Any:
    over = unit.all_ran
    if over:
        output = _cast_output(unit, output)
    tensors = list(tensors_in(output))
    if torch.is_grad_enabled():
        _watch_outputs(unit, [*tensors, *unit.side_outputs.collect()], unit.backward_begun)
    returns_freed = over and unit.frees_after_forward and unit.owns_full_memory_of(tensors)
    if over:
        context.end_unit_forward(unit)
    if returns_freed:
        raise RuntimeError(
            f"unit {unit.name!r} returned its own weights, or a view of them, which are freed after its forward; "
            "return a clone, or let the unit that uses them own them"
        )
    return output


def _run_recomputation(unit: Unit, context: Context, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A forward inside a backward graph, where activation checkpointing repeats it."""
    started = unit.phase is Phase.IDLE
    if started:
        unit.move_to(Phase.FORWARD)
        context.begin_recomputation()
    try:
        _make_ready(unit, context)
        args, kwargs = _prepare_inputs(unit, args, kwargs, marked=True)
        output = forward(*args, **kwargs)
    finally:
        # Checkpointing ends the forward by an exception as soon as it has what it needs.
        if started:
            unit.move_to(Phase.IDLE)
            # Most often the backward of the same weights comes next, so they stay until another forward.
            context.note_recomputed(unit)
    output = _cast_output(unit, output)
    if torch.is_grad_enabled():
        _watch_outputs(unit, [*tensors_in(output), *unit.side_outputs.collect()], None)
    return output


def _pre_backward(unit: Unit, version: int, begun: list[bool] | None, grad: Any) -> None:
    """Prepare for the backward of a call that computed with ``version`` of the weights.

    ``begun`` is what the calls of a unit of several modules share: the first of their backwards prepares for all.
    """
    if begun is not None:
        if begun:
            return
        begun.append(True)
    context = unit.context
    assert context is not None
    if unit.phase is Phase.FORWARD:
        raise RuntimeError(f"a backward through unit {unit.name!r} started inside its own forward")
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a backward with create_graph=True reached unit {unit.name!r}: a second backward through it would read "
            "weights that are freed by then"
        )
    if version != unit.weights_version():
        raise RuntimeError(
            f"the weights of unit {unit.name!r} were written between its forward and its backward, which would "
            "compute gradients with other weights; run backward before the optimizer step or the load"
        )
    context.begin_backward()
    unit.active_backwards += 1
    if unit.phase is Phase.IDLE:
        unit.move_to(Phase.BACKWARD)
    expected = context.backward_order.note(unit)
    if unit.unshard_in_backward:
        _make_ready(unit, context)
    context.prefetch(
        expected if expected is not None and expected.unshard_in_backward else None,
        [other for other in unit.backward_prefetch if other.unshard_in_backward],
    )


def _post_backward(unit: Unit) -> None:
    context = unit.context
    assert context is not None
    unit.active_backwards = max(unit.active_backwards - 1, 0)
    if unit.active_backwards:
        # Another call of the module is still in its backward and needs the weights.
        return
    if unit.phase is Phase.BACKWARD:
        unit.move_to(Phase.IDLE)
    if unit.reshard_after_backward:
        unit.reshard(context.streams)
    context.reduce_gradients(unit, ran=True)


def _make_ready(unit: Unit, context: Context) -> int:
    """Put the unit's present weights into its modules; their version."""
    version = unit.start_unshard(context.streams)
    unit.finish_unshard()
    unit.prefetched = False
    unit.bind_unsharded()
    return version


class _PostBackward(torch.autograd.Function):
    """Passes a unit's inputs through; its backward runs when the gradients of all of them exist.

    By then autograd has accumulated the gradients of the unit's parameters, since it runs those nodes first.
    """

    @staticmethod
    def forward(ctx: Any, unit: Unit, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _post_backward(ctx.unit)
        return None, *grads


def _prepare_inputs(unit: Unit, args: Any, kwargs: Any, marked: bool) -> tuple[Any, Any]:
    """Cast floating-point inputs and mark those whose gradient tells that the unit's backward is over, if asked to."""
    dtype = unit.mp_policy.param_dtype if unit.mp_policy.cast_forward_inputs else None
    inputs = (args, kwargs)
    if dtype is not None:
        inputs = map_tensors(inputs, partial(_cast, dtype=dtype))
    if torch.is_grad_enabled():
        inputs = _mark_inputs(unit, inputs) if marked else inputs
        unit.side_outputs.note_arguments([*inputs[0], *inputs[1].values()])
    return inputs


def _mark_inputs(unit: Unit, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
    """Pass inputs that need a gradient through ``_PostBackward``.

    Autograd runs nodes in the reverse order of their making, so any marked input comes after all of the unit. Inputs
    inside containers are marked only for want of others, since that copies the container.
    """
    args, kwargs = inputs
    direct = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    found = {id(tensor): tensor for tensor in direct if tensor.requires_grad}
    if not found:
        found = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
    if not found:
        return inputs
    outputs = _PostBackward.apply(unit, *found.values())  # type: ignore[no-untyped-call]
    marked = dict(zip(found, outputs, strict=True))
    if found.keys().isdisjoint(map(id, direct)):
        result: tuple[Any, Any] = map_tensors(inputs, lambda tensor: marked.get(id(tensor), tensor))
        return result
    new_kwargs = {key: marked.get(id(value), value) for key, value in kwargs.items()}
    return tuple([marked.get(id(value), value) for value in args]), new_kwargs


def _watch_outputs(unit: Unit, tensors: list[torch.Tensor], begun: list[bool] | None) -> None:
    """Call the unit before the backward of the call that gave these tensors."""
    tensors = [tensor for tensor in tensors if tensor.requires_grad and not tensor.is_leaf]
    if not tensors:
        return
    unit.awaits_backward = True
    before_backward = partial(_pre_backward, unit, unit.forward_version, begun)
    if len(tensors) == 1:
        tensors[0].register_hook(before_backward)
    else:
        torch.autograd.graph.register_multi_grad_hook(tensors, before_backward, mode="any")


def _cast_output(unit: Unit, output: Any) -> Any:
    dtype = unit.mp_policy.output_dtype
    return output if dtype is None else map_tensors(output, partial(_cast, dtype=dtype))


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
