"""What the units below one root share: order, streams, reductions in flight, and the end of a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..memory.allocator import BucketAllocator, DynamicAllocator
from ..memory.host_copies import Kind
from ..sharding.gradients import GroupGradients
from ..sharding.mesh import DataParallelMesh, among_neighbours
from ..sharding.parameter_group import ParameterGroup
from .agreement import Agreement
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
        self.agreement = Agreement(root.mesh, root.agreement_mode)
        self.forward_order = OrderRecorder()
        self.backward_order = OrderRecorder()
        self._forward_ends: list[Unit] = []
        self._ahead: Unit | None = None
        self._chosen_ahead: list[Unit] = []
        self._recomputed: list[Unit] = []
        self.in_root_forward = False
        self._end_of_backward: weakref.ref[Callable[[], None]] | None = None
        self._in_flight: list[tuple[GroupGradients, Pending]] = []
        for unit in self.units:
            unit.check_parameters()
            unit.check_values()
            unit.warn_of_hooks()
        self.agreement.compare_structure(self.units)
        # The first forward may come under inference mode, and what is built here has to serve training too.
        with torch.inference_mode(False):
            for unit in self.units:
                unit.context = self
                unit.prepare()
            self._prepare_parts()
        self._watch_optimizers()

    def _prepare_parts(self) -> None:
        neighbours: dict[tuple[Any, int], DataParallelMesh] = {}
        for unit in self.units:
            ranks = unit.shared_among
            if ranks is None:
                continue
            key = (unit.mesh.shard.group, ranks)
            if key not in neighbours:
                neighbours[key] = among_neighbours(unit.mesh, ranks)
            for group in unit.groups:
                group.prepare_part(replace(unit.mesh, shard=neighbours[key].shard))

    # Forward and backward passes

    def begin_forward(self) -> None:
        """A forward of the root starts."""
        for unit in self.units:
            unit.check_parameters()
        if not self._in_flight:
            self.bring_back(Kind.MAIN_GRADIENTS)
            for gradients in self.all_gradients():
                gradients.free_if_cleared()
        self.in_root_forward = True
        self.forward_order.begin()
        self._forward_ends = []
        event, self.root.post_optim_event = self.root.post_optim_event, None
        self.streams.gather_after_compute(event)

    def end_unit_forward(self, unit: Unit) -> None:
        """The forward of a unit ended: it comes to rest, or keeps its weights for backward."""
        unit.move_to(Phase.IDLE)
        if unit.frees_after_forward:
            unit.reshard(self.streams, keep_part=unit.awaits_backward and unit.shared_among is not None)
        elif not unit.awaits_backward:
            unit.bind_sharded()
        if self.in_root_forward:
            # Backward starts out from the reverse of the order in which forwards end.
            self._forward_ends.append(unit)
        if unit is self.root:
            self._end_forward()

    def _end_forward(self) -> None:
        for unit in self.units:
            if unit.phase is Phase.FORWARD:
                # Only some of the unit's modules had a part in this forward.
                unit.forget_rest()
                self.end_unit_forward(unit)
        self.agreement.compare("end the forward")
        self.in_root_forward = False
        self.forward_order.commit()
        self.backward_order.suppose(reversed(self._forward_ends))
        self.prefetch(None)
        self._drop_chosen()

    def abandon_forward(self, unit: Unit) -> None:
        """The forward of a unit raised: bring it to rest, and if it's the root's, all that ran below."""
        for other in self.units if unit is self.root else [unit]:
            if other.phase is Phase.FORWARD:
                other.forget_rest()
                other.move_to(Phase.IDLE)
                other.reshard(self.streams)
        if unit is self.root:
            self.in_root_forward = False
            self.forward_order.begin()
            self.prefetch(None)
            self._drop_chosen()

    def prefetch(self, expected: Unit | None, chosen: Sequence[Unit] = ()) -> None:
        """Gather ahead for the unit expected next, and free what was gathered ahead but didn't come.

        Units that a user chose come in place of the expected one, and stay gathered until the pass ends.
        """
        ahead, self._ahead = self._ahead, None if chosen else expected
        if ahead is not None and ahead.prefetched and ahead is not expected and ahead not in chosen:
            ahead.reshard(self.streams)
        for unit in chosen:
            self._gather_ahead(unit)
            self._chosen_ahead.append(unit)
        if self._ahead is not None:
            self._gather_ahead(self._ahead)

    def _gather_ahead(self, unit: Unit) -> None:
        if not unit.is_bound and not unit.prefetched and unit.context is not None:
            unit.prefetched = True
            unit.start_unshard(self.streams)

    def _drop_chosen(self) -> None:
        while self._chosen_ahead:
            unit = self._chosen_ahead.pop()
            if unit.prefetched:
                unit.reshard(self.streams)

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

    @torch.no_grad()
    def end_backward(self) -> None:
        """The whole backward graph ran: bring every unit to rest with its gradients reduced."""
        for unit in self.units:
            unit.active_backwards = 0
            if unit.phase is Phase.BACKWARD:
                unit.move_to(Phase.IDLE)
            self.reduce_gradients(unit, overdue=True)
        self._chosen_ahead = []
        for unit in self.units:
            unit.prefetched = False
            # A backward may run inside the forward of units that have no part in it.
            if unit.reshard_after_backward and unit.phase is Phase.IDLE:
                unit.reshard(self.streams)
        self.backward_order.commit()
        self._recomputed = []
        self._end_of_backward = None
        self.agreement.compare("end the backward")
        self.agreement.end_step()
        if self.root.is_last_backward:
            self.settle_gradients()

    def reset(self) -> None:
        """Bring every unit to rest after a pass that raised, and forget the gradients it left anywhere."""
        self.abandon_forward(self.root)
        self._abandon_backward()
        self.bring_back(Kind.MAIN_GRADIENTS)
        for gradients in self.all_gradients():
            gradients.drop_pending()

    def clear_failed_backward(self) -> None:
        """Bring units to rest if a backward raised since."""
        if self._end_of_backward is not None and not self.backward_open:
            self._abandon_backward()

    @torch.no_grad()
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

    def reduce_gradients(self, unit: Unit, overdue: bool = False, ran: bool = False) -> None:
        """Collect what autograd gave the unit and start reducing it, as far as this micro-batch asks for.

        ``overdue`` also reduces what earlier micro-batches put off, should this one give no gradient. ``ran`` tells
        that the unit's backward was run, after which a unit may be told to reduce zeros rather than nothing.
        """
        for group in unit.groups:
            gradients = group.gradients
            if gradients is None:
                continue
            stages = unit.stages_to_run(group)
            unused = ran and unit.reduces_unused
            if unused or gradients.has_new() or (overdue and gradients.is_waiting_before(stages)):
                self._reduce(unit, gradients, stages, force=unused)

    def _reduce(self, unit: Unit, gradients: GroupGradients, stages: int, force: bool = False) -> None:
        # One reduction at a time: the memory of collected gradients is then one group's.
        self.finish_reductions()
        unit.host_copies.give_back([Kind.MAIN_GRADIENTS])
        if stages:
            # Before anything is taken in: after a disagreement the gradients are still where autograd left them.
            self.agreement.compare(f"reduce gradients of unit {unit.name!r}")
        if gradients.collect(stages, force):
            self._in_flight.append((gradients, self.streams.run_reduction(gradients.reduce(stages))))

    def finish_reductions(self) -> None:
        """Wait for reductions in flight and free the gradients they read."""
        while self._in_flight:
            gradients, pending = self._in_flight.pop()
            pending.wait()
            gradients.release()

    @torch.no_grad()
    def finish_grad_sync(self, include_unused: bool = False) -> None:
        """Reduce whatever was put off. ``include_unused`` gives units without any gradient zeros (a collective)."""
        for unit in self.units:
            for group in unit.groups:
                gradients = group.gradients
                if gradients is None:
                    continue
                unused = include_unused and not gradients.is_exposed
                if unused or gradients.has_pending or gradients.has_new():
                    self._reduce(unit, gradients, gradients.stages, force=unused)
        self.settle_gradients()

    @torch.no_grad()
    def settle_gradients(self) -> None:
        """Finish the reductions in flight, make ``.grad`` final, and call users' hooks, which may step an optimizer."""
        self.finish_reductions()
        self.bring_back(Kind.MAIN_GRADIENTS)
        for gradients in [gradients for gradients in self.all_gradients() if gradients.expose()]:
            gradients.call_hooks()

    @property
    def has_reductions_in_flight(self) -> bool:
        """Whether a reduction was started that nobody waited for yet."""
        return bool(self._in_flight)

    def bring_back(self, kind: Kind) -> None:
        """Bring back what of a kind is in CPU memory."""
        for unit in self.units:
            unit.host_copies.give_back([kind])

    def all_gradients(self) -> list[GroupGradients]:
        """Gradients of all trainable groups, in registration order."""
        return [group.gradients for group in self.all_groups() if group.gradients is not None]

    def all_groups(self) -> list[ParameterGroup]:
        """All parameter groups, in registration order."""
        return [group for unit in self.units for group in unit.groups]

    # Optimizers

    def _watch_optimizers(self) -> None:
        """Notice steps of all optimizers, for as long as the context lives."""
        # Those that stepped parameters below the root, and those whose state dicts bring their state back.
        self.steppers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        groups = self.all_groups()
        self._group_of = {id(param): group for group in groups for param in group.sharded_params}
        self._gathered_names = {
            id(param): name for group in groups for name, param in zip(group.names, group.unsharded_params, strict=True)
        }
        for register, method in (
            (register_optimizer_step_pre_hook, Context.check_optimizer),
            (register_optimizer_step_post_hook, Context.note_step),
        ):
            handle = register(_StepHook(weakref.ref(self), method))
            # Those of contexts that are gone go now: garbage collection may come while torch runs through its hooks.
            hooks = handle.hooks_dict_ref()
            assert hooks is not None
            for key in [key for key, hook in hooks.items() if isinstance(hook, _StepHook) and hook.context() is None]:
                del hooks[key]

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step.

        Raises:
            RuntimeError: it was given gathered weights, or gradients of its parameters were never reduced.
        """
        self.clear_failed_backward()
        if not self.root.is_last_backward:
            self.settle_gradients()
        names = [self._gathered_names[key] for key in _param_ids(optimizer) if key in self._gathered_names]
        if names:
            raise RuntimeError(
                f"the optimizer was given the gathered weights {', '.join(names)}, which it can't train; build it "
                "while the module is at rest: before a forward, or after a backward"
            )

        stepped = {id(self._group_of[key]) for key in _param_ids(optimizer) if key in self._group_of}
        if stepped:
            self.steppers.add(optimizer)
        for unit in self.units:
            if any([id(group) in stepped for group in unit.groups]):
                unit.host_copies.give_back()
            for group in unit.groups:
                if id(group) in stepped and group.gradients is not None and group.gradients.has_new():
                    raise RuntimeError(
                        f"unit {unit.name!r} got gradients that no backward through its outputs announced, so they "
                        "were not reduced; call finish_grad_sync() on the root before the optimizer steps"
                    )

    def note_step(self, optimizer: Optimizer) -> None:
        """An optimizer stepped, which may write weights through raw pointers that no version counter sees."""
        for group in {self._group_of.get(key) for key in _param_ids(optimizer)}:
            # Without a gradient no optimizer writes a parameter, frozen ones included.
            if group is not None and group.trainable:
                group.mark_updated()


class _StepHook:
    """Tells a context, while it lives, of the steps of all optimizers."""

    def __init__(self, context: weakref.ref[Context], method: Callable[[Context, Optimizer], None]) -> None:
        self.context = context
        self._method = method

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        context = self.context()
        if context is not None:
            self._method(context, optimizer)


def _param_ids(optimizer: Optimizer) -> list[int]:
    return [id(param) for options in optimizer.param_groups for param in options["params"]]


def in_autograd_backward() -> bool:
    """Whether the caller runs inside a backward graph, as recomputed forwards do."""
    return torch._C._current_graph_task_id() != -1
