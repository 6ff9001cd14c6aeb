"""What the units below one root share: order, streams, reductions in flight, and the end of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..memory.allocator import BucketAllocator, DynamicAllocator
from ..sharding.gradients import GroupGradients
from ..sharding.parameter_group import ParameterGroup
from .order import OrderRecorder
from .streams import Pending, Streams
from .unit import Phase, Unit


class Context:
    """Runtime state of a root and its units, in registration order (that of ``modules()``)."""

    def __init__(self, root: Unit, units: Sequence[Unit], streams: Streams) -> None:
        self.root = root
        self.units = list(units)
        self.streams = streams
        self.allocator: BucketAllocator = DynamicAllocator()
        self.forward_order = OrderRecorder()
        self.backward_order = OrderRecorder()
        self._forward_ends: list[Unit] = []
        self._ahead: Unit | None = None
        self._recomputed: list[Unit] = []
        self.in_root_forward = False
        self._end_of_backward: weakref.ref[Callable[[], None]] | None = None
        self._in_flight: list[tuple[GroupGradients, Pending]] = []
        for unit in self.units:
            unit.check_parameters()
        # The first forward may come under inference mode, and what is built here has to serve training too.
        with torch.inference_mode(False):
            for unit in self.units:
                unit.context = self
                unit.prepare()
        self._watch_optimizers()

    # Forward and backward passes

    def begin_forward(self) -> None:
        """A forward of the root starts: leftovers of a pass that raised are cleared first."""
        if any([unit.phase is not Phase.IDLE for unit in self.units]):
            for unit in self.units:
                unit.phase = Phase.IDLE
            self._abandon_backward()
        for unit in self.units:
            unit.check_parameters()
        self.in_root_forward = True
        self.forward_order.begin()
        self._forward_ends = []
        self.streams.gather_after_compute()

    def end_forward(self) -> None:
        """A forward of the root ended."""
        self.in_root_forward = False
        self.forward_order.commit()
        self.backward_order.suppose(reversed(self._forward_ends))
        self.prefetch(None)

    def note_forward_end(self, unit: Unit) -> None:
        """Remember the order in which forwards end; backward starts out from its reverse."""
        self._forward_ends.append(unit)

    def prefetch(self, unit: Unit | None) -> None:
        """Gather ahead for the unit that is expected next, and free what was gathered ahead but didn't come."""
        ahead, self._ahead = self._ahead, unit
        if ahead is not None and ahead.prefetched and ahead is not unit:
            ahead.reshard(self.streams)
        if unit is not None and not unit.is_bound and not unit.prefetched:
            unit.prefetched = True
            unit.start_unshard(self.streams)

    def begin_recomputation(self) -> None:
        """A forward is recomputed: free the weights of those recomputed before, whose backward didn't come yet."""
        for unit in self._recomputed:
            if unit.phase is Phase.IDLE and unit.reshard_after_forward:
                unit.reshard(self.streams)
        self._recomputed = []

    def note_recomputed(self, unit: Unit) -> None:
        """A recomputed forward ended and left its weights gathered."""
        self._recomputed.append(unit)

    @property
    def backward_open(self) -> bool:
        """Whether a backward runs that will call ``end_backward``."""
        return self._end_of_backward is not None and self._end_of_backward() is not None

    def begin_backward(self) -> None:
        """A unit's backward is about to run: if it's the first, have ``end_backward`` called at the end of the graph.

        The graph alone holds the callback, so that a reference to it dies with a backward that raises.
        """
        if self.backward_open:
            return
        self.clear_failed_backward()
        end = partial(self.end_backward)
        self._end_of_backward = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)
        self.backward_order.begin()

    def end_backward(self) -> None:
        """The whole backward graph ran: bring every unit to rest with its gradients reduced."""
        for unit in self.units:
            unit.active_backwards = 0
            if unit.phase is Phase.BACKWARD:
                unit.move_to(Phase.IDLE)
            self.reduce_gradients(unit, overdue=True)
        self.finish_reductions()
        for unit in self.units:
            unit.prefetched = False
            # A backward may run inside the forward of units that have no part in it.
            if unit.reshard_after_backward and unit.phase is Phase.IDLE:
                unit.reshard(self.streams)
        self.backward_order.commit()
        self._recomputed = []
        self._end_of_backward = None
        self.expose_gradients()

    def clear_failed_backward(self) -> None:
        """Bring units to rest if a backward raised since."""
        if self._end_of_backward is not None and not self.backward_open:
            self._abandon_backward()

    def _abandon_backward(self) -> None:
        """Bring units to rest after a backward that raised; what it gave and wasn't reduced yet is dropped."""
        self.finish_reductions()
        self._end_of_backward = None
        for gradients in self.all_gradients():
            gradients.drop_new()
        for unit in self.units:
            unit.active_backwards = 0
            if unit.phase is Phase.BACKWARD:
                unit.move_to(Phase.IDLE)
            if unit.phase is Phase.IDLE:
                unit.reshard(self.streams)

    # Gradients

    def reduce_gradients(self, unit: Unit, overdue: bool = False) -> None:
        """Collect what autograd gave the unit and start reducing it, as far as this micro-batch asks for.

        ``overdue`` also reduces what earlier micro-batches put off, should this one give no gradient.
        """
        for group in unit.groups:
            gradients = group.gradients
            if gradients is None:
                continue
            stages = unit.stages_to_run(group)
            if gradients.has_new() or (overdue and gradients.is_waiting_before(stages)):
                self._reduce(gradients, stages)

    def _reduce(self, gradients: GroupGradients, stages: int, force: bool = False) -> None:
        # One reduction at a time: the memory of collected gradients is then one group's.
        self.finish_reductions()
        if gradients.collect(stages, force):
            self._in_flight.append((gradients, self.streams.run_reduction(gradients.reduce(stages))))

    def finish_reductions(self) -> None:
        """Wait for reductions in flight and free the gradients they read."""
        while self._in_flight:
            gradients, pending = self._in_flight.pop()
            pending.wait()
            gradients.release()

    def finish_grad_sync(self, include_unused: bool = False) -> None:
        """Reduce whatever was put off. ``include_unused`` gives units without any gradient zeros (a collective)."""
        for unit in self.units:
            for group in unit.groups:
                gradients = group.gradients
                if gradients is None:
                    continue
                unused = include_unused and not gradients.is_exposed
                if unused or gradients.has_pending or gradients.has_new():
                    self._reduce(gradients, gradients.stages, force=unused)
        self.finish_reductions()
        self.expose_gradients()

    def expose_gradients(self) -> None:
        """Show the optimizer what was reduced, then call users' hooks, which may step an optimizer."""
        for gradients in [gradients for gradients in self.all_gradients() if gradients.expose()]:
            gradients.call_hooks()

    def all_gradients(self) -> list[GroupGradients]:
        """Gradients of all trainable groups, in registration order."""
        return [group.gradients for group in self.all_groups() if group.gradients is not None]

    def all_groups(self) -> list[ParameterGroup]:
        """All parameter groups, in registration order."""
        return [group for unit in self.units for group in unit.groups]

    # Optimizers

    def _watch_optimizers(self) -> None:
        """Notice steps of all optimizers, for as long as the context lives."""
        groups = self.all_groups()
        self._group_of = {id(param): group for group in groups for param in group.sharded_params}
        self._gathered_names = {
            id(param): name for group in groups for name, param in zip(group.names, group.unsharded_params, strict=True)
        }
        context = weakref.ref(self)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if live := context():
                live.check_optimizer(optimizer)

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if live := context():
                live.note_step(optimizer)

        for handle in (register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step)):
            weakref.finalize(self, handle.remove)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step.

        Raises:
            RuntimeError: it was given gathered weights, or gradients of its parameters were never reduced.
        """
        self.clear_failed_backward()
        names = [self._gathered_names[key] for key in _param_ids(optimizer) if key in self._gathered_names]
        if names:
            raise RuntimeError(
                f"the optimizer was given the gathered weights {', '.join(names)}, which it can't train; build it "
                "while the module is at rest: before a forward, or after a backward"
            )

        stepped = {id(self._group_of[key]) for key in _param_ids(optimizer) if key in self._group_of}
        for unit in self.units:
            for group in unit.groups:
                if id(group) in stepped and group.gradients is not None and group.gradients.has_new():
                    raise RuntimeError(
                        f"unit {unit.name!r} got gradients that no backward through its outputs announced, so they "
                        "were not reduced; call finish_grad_sync() on the root before the optimizer steps"
                    )

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer stepped, which may write weights through raw pointers that no version counter sees."""
        for group in {self._group_of.get(key) for key in _param_ids(optimizer)}:
            if group is not None:
                group.mark_updated()


def _param_ids(optimizer: Optimizer) -> list[int]:
    return [id(param) for options in optimizer.param_groups for param in options["params"]]


def in_autograd_backward() -> bool:
    """Whether the caller runs inside a backward graph, as recomputed forwards do."""
    return torch._C._current_graph_task_id() != -1
