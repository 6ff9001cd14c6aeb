"""A pool whose buffers lie where the trace of one step says that they can."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch

from .allocator import BucketAllocator, BufferSpec, DynamicAllocator, check_change, refuse_live
from .coloring import color
from .device import refuse_in_graphs, settle
from .slots import Binding, Slot, SlotStats, pool_stats, slots_table
from .stats import AllocatorStats, stats_table
from .trace import Trace


class Phase(Enum):
    """Buffers have memory of their own and are traced; they lie in slots; they do, and slots have no memory now."""

    TRACING = "tracing"
    READY = "ready"
    RELEASED = "released"


@dataclass(frozen=True)
class BufferLifetime:
    """A buffer was in use from event ``start`` until just before event ``end`` of the traced step."""

    buffer: str
    nbytes: int
    slot: int
    start: int
    end: int


class TracePoolAllocator(BucketAllocator):
    """Lends buffers memory that is taken once and shared by those that are never in use together.

    While tracing each buffer has memory of its own, as with the ``DynamicAllocator``. ``plan`` puts buffers into slots,
    and from then on ``allocate`` and ``free`` only look up: no address changes, and the device is asked for nothing.
    ``fully_shard(allocator=...)`` has the plan made after the second step, whose order of gathers repeats.

    A buffer that first comes into use after the plan gets a slot of its own, with a warning. One whose slot is in
    use, because units run in an order that the trace didn't show, raises: ``reset`` traces anew.

    Args:
        strict: raise for a buffer that the trace didn't show, rather than give it a slot.
        memory_context: returns a context manager inside which slots get their memory, such as
            ``partial(torch.cuda.use_mem_pool, pool)``.
    """

    def __init__(
        self, *, strict: bool = False, memory_context: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._strict = strict
        self._memory_context = memory_context
        self._dynamic = DynamicAllocator()
        self._trace = Trace()
        # Of all buffers in arenas that were ever asked for, the planned ones among them bound to slots.
        self._specs: dict[Hashable, BufferSpec] = {}
        self._bindings: dict[Hashable, Binding] = {}
        # Bindings while slots have no memory, so that a look-up among the others misses.
        self._parked: dict[Hashable, Binding] = {}
        self._slots: list[Slot] = []
        self._collisions = 0
        self._late_keys = 0
        self._redundant_frees = 0
        self.generation = 0
        self._enter(Phase.TRACING)

    @property
    def phase(self) -> Phase:
        return self._phase

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self.is_tracing = phase is Phase.TRACING

    # Lending

    def allocate(self, key: Hashable, spec: BufferSpec) -> torch.Tensor:
        """Give the key's tensor memory; contents are undefined. A live key gets its tensor back unchanged.

        Raises:
            ValueError: the key had another dtype, device or arena before, or was planned with fewer elements.
            RuntimeError: another live key lies in the same slot.
            KeyError: the trace didn't show the key, and the pool is strict.
        """
        binding = self._bindings.get(key)
        if binding is None:
            return self._allocate_unplanned(key, spec)
        tensor = binding.tensor if spec is binding.spec else binding.resized(spec)
        slot = binding.slot
        owner = slot.owner
        if owner is None:
            slot.owner = binding
        elif owner is not binding:
            self._collisions += 1
            raise RuntimeError(
                f"buffer {key} needs slot {slot.index} of the memory pool, which {owner.key} is using (phase "
                f"{self._phase.value}): units run in an order that the traced step didn't show; reset() the pool to "
                "trace again, or do without it"
            )
        return tensor

    def free(self, key: Hashable) -> None:
        binding = self._bindings.get(key)
        if binding is None:
            self._free_unplanned(key)
        elif binding.slot.owner is binding:
            binding.slot.owner = None
        else:
            self._redundant_frees += 1

    def is_live(self, key: Hashable) -> bool:
        binding = self._bindings.get(key)
        return self._dynamic.is_live(key) if binding is None else binding.slot.owner is binding

    def _allocate_unplanned(self, key: Hashable, spec: BufferSpec) -> torch.Tensor:
        if spec.arena is None:
            return self._dynamic.allocate(key, spec)
        if self._phase is Phase.RELEASED:
            self.resume()
            return self.allocate(key, spec)
        if self._phase is Phase.TRACING:
            starts = not self._dynamic.is_live(key)
            tensor = self._dynamic.allocate(key, spec)
            self._note(key, spec)
            if starts:
                self._trace.allocate(key, spec)
            return tensor
        self._bind_late(key, spec)
        return self.allocate(key, spec)

    def _free_unplanned(self, key: Hashable) -> None:
        known = key in self._specs
        if known and not self._dynamic.is_live(key):
            self.resume()
            self._redundant_frees += 1
            return
        self._dynamic.free(key)
        if known:
            self._trace.free(key)

    def _note(self, key: Hashable, spec: BufferSpec) -> None:
        known = self._specs.get(key)
        if known is None or spec.numel > known.numel:
            self._specs[key] = spec

    def _bind_late(self, key: Hashable, spec: BufferSpec) -> None:
        if self._strict:
            raise KeyError(f"buffer {key} is not in the traced step that the memory pool was planned from; reset() it")
        refuse_in_graphs(f"add buffer {key} to the memory pool", spec.device)
        known = self._specs.get(key)
        if known is not None:
            check_change(key, known, spec, may_grow=True)
        warnings.warn(
            f"buffer {key} was not in use in the step that the memory pool was planned from, and gets {spec.nbytes} "
            "bytes that it shares with no other; reset() the pool in a step that uses it, to place it among the others",
            stacklevel=4,
        )
        self._note(key, spec)
        with self._memory_context():
            self._add_slot({key: self._specs[key]})
        self._late_keys += 1

    # The plan

    def reserve(self, key: Hashable, spec: BufferSpec) -> None:
        """Tell that a later step may allocate the key at this moment, though this one doesn't."""
        if self.is_tracing and spec.arena is not None:
            self._note(key, spec)
            if not self._dynamic.is_live(key):
                self._trace.reserve(key, spec)

    def begin_trace(self) -> None:
        """Forget lifetimes seen so far: a step begins like those to come. Without effect once there's a plan."""
        if self.is_tracing:
            self._trace = self._trace.resumed()

    def plan(self) -> None:
        """Put the traced buffers into slots, as few bytes of them as found, and take their memory.

        Raises:
            RuntimeError: a key of an arena is live, there's a plan already, or a graph is being captured.
        """
        if not self.is_tracing:
            raise RuntimeError(f"the memory pool is planned already (phase {self._phase.value}); reset() it before")
        refuse_live("plan", self._live())
        trace = self._trace
        devices = list(dict.fromkeys([spec.device for spec in trace.specs.values()]))
        for device in devices:
            refuse_in_graphs("plan the memory pool", device)
        for key in self._specs:
            if self._dynamic.knows(key):
                self._dynamic.forget(key)
        self.generation += 1
        for device in devices:
            settle(device)
        try:
            with self._memory_context():
                for keys in self._arenas():
                    sizes = {key: self._specs[key].nbytes for key in keys}
                    for slot in color(sizes, trace.conflicts, trace.ranks):
                        self._add_slot({key: self._specs[key] for key in slot.keys})
        except BaseException:
            self._drop_slots()
            raise
        self._enter(Phase.READY)

    def _arenas(self) -> list[list[Hashable]]:
        """Traced buffers by arena and device."""
        arenas: dict[tuple[str | None, torch.device], list[Hashable]] = {}
        for key, spec in self._trace.specs.items():
            arenas.setdefault((spec.arena, spec.device), []).append(key)
        return list(arenas.values())

    # Buffers serve training even when made in an evaluation.
    @torch.inference_mode(False)
    def _add_slot(self, specs: Mapping[Hashable, BufferSpec]) -> None:
        slot = Slot(len(self._slots), specs)
        self._slots.append(slot)
        for binding in slot.members:
            self._bindings[binding.key] = binding

    def release(self) -> None:
        """Give the memory of slots back and keep the plan; while tracing the same as ``reset``. Twice is once.

        Raises:
            RuntimeError: a key of an arena is live; names them.
        """
        refuse_live("release", self._live())
        if self._phase is Phase.TRACING:
            self.reset()
        elif self._phase is Phase.READY:
            for slot in self._slots:
                slot.drop_memory()
            self._bindings, self._parked = {}, self._bindings
            self._enter(Phase.RELEASED)

    def resume(self) -> None:
        """Take the memory of slots again, at other addresses; the first ``allocate`` or ``free`` does it by itself.

        Raises:
            RuntimeError: a graph is being captured.
        """
        if self._phase is not Phase.RELEASED:
            return
        devices = list(dict.fromkeys([slot.device for slot in self._slots]))
        for device in devices:
            refuse_in_graphs("take memory for the memory pool", device)
            settle(device)
        with self._memory_context():
            for slot in self._slots:
                slot.take_memory()
        self._bindings, self._parked = self._parked, {}
        self._enter(Phase.READY)
        self.generation += 1

    def reset(self) -> None:
        """Forget the plan and trace anew: after changes of the model, its strategy, or what is gathered ahead.

        Raises:
            RuntimeError: a key of an arena is live; names them.
        """
        refuse_live("reset", self._live())
        for key in self._specs:
            if self._dynamic.knows(key):
                self._dynamic.forget(key)
        self._drop_slots()
        self._specs = {}
        self._trace = Trace()
        self._enter(Phase.TRACING)
        self.generation += 1

    def _drop_slots(self) -> None:
        # Views of slots may outlive them.
        for slot in self._slots:
            slot.drop_memory()
        self._slots, self._bindings, self._parked = [], {}, {}
        self._late_keys = 0

    def _live(self) -> list[Hashable]:
        if self.is_tracing:
            return self._trace.live
        return [slot.owner.key for slot in self._slots if slot.owner is not None]

    # Looking at it

    def stats(self) -> AllocatorStats:
        """Figures of this rank, in bytes."""
        dynamic = self._dynamic.stats()
        return AllocatorStats(
            phase=self._phase.value,
            generation=self.generation,
            peak_live_bytes=self._trace.tally.peak_bytes,
            collisions=self._collisions,
            late_keys=self._late_keys,
            redundant_frees=self._redundant_frees + dynamic.redundant_frees,
            **pool_stats(self._slots, self._trace.tally, dynamic),
        )

    def slots(self) -> tuple[SlotStats, ...]:
        """The slots of the plan, in order; none while tracing."""
        return tuple([slot.stats() for slot in self._slots])

    def lifetimes(self) -> tuple[BufferLifetime, ...]:
        """When planned buffers were in use in the traced step, in the order in which their uses ended."""
        where = self._bindings or self._parked
        return tuple(
            BufferLifetime(str(key), where[key].spec.nbytes, where[key].slot.index, start, end)
            for key, start, end in self._trace.lifetimes
            if key in where
        )

    def dump(self) -> str:
        """The figures, and below them slots and what shares them, as tables to print."""
        return "\n\n".join([stats_table(self.stats()), slots_table(self.slots())])
