"""When buffers were in use over a step, and which of them at once. Arithmetic alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

from .allocator import BufferSpec
from .stats import ArenaTally

# A step has a few thousand lifetimes. What never comes to a plan, such as inference, must not fill memory with them.
MAX_LIFETIMES = 1 << 17


class Lifetime(NamedTuple):
    """A buffer was in use from event ``start`` until just before event ``end``."""

    key: Hashable
    start: int
    end: int


class Trace:
    """Follows buffers of arenas through allocations and frees.

    ``conflicts`` holds for each buffer those of its arena in use at the same time, ever; ``ranks`` numbers buffers by
    their first allocation.
    """

    def __init__(self) -> None:
        self.specs: dict[Hashable, BufferSpec] = {}
        self.conflicts: dict[Hashable, set[Hashable]] = {}
        self.ranks: dict[Hashable, int] = {}
        self.lifetimes: deque[Lifetime] = deque(maxlen=MAX_LIFETIMES)
        self.tally = ArenaTally()
        self._live: dict[Hashable, int] = {}
        self._clock = 0

    @property
    def live(self) -> list[Hashable]:
        """Buffers in use, in the order of their allocation."""
        return list(self._live)

    def allocate(self, key: Hashable, spec: BufferSpec) -> None:
        """A buffer that isn't in use comes into use. A larger size than before is its size from now on."""
        spec = self._meet(key, spec)
        self._live[key] = self._tick()
        self.tally.add(spec.arena, spec.device, spec.nbytes)

    def free(self, key: Hashable) -> None:
        """A buffer in use no longer is."""
        spec = self.specs[key]
        self.lifetimes.append(Lifetime(key, self._live.pop(key), self._tick()))
        self.tally.remove(spec.arena, spec.device, spec.nbytes)

    def reserve(self, key: Hashable, spec: BufferSpec) -> None:
        """A buffer that isn't in use might have been in use just now."""
        spec = self._meet(key, spec)
        self.tally.add(spec.arena, spec.device, spec.nbytes)
        self.tally.remove(spec.arena, spec.device, spec.nbytes)

    def resumed(self) -> Trace:
        """A new trace that begins with the buffers in use now."""
        trace = Trace()
        for key in self._live:
            trace.allocate(key, self.specs[key])
        return trace

    def _meet(self, key: Hashable, spec: BufferSpec) -> BufferSpec:
        """Note that a buffer conflicts with all in use; its spec of the largest size."""
        known = self.specs.get(key)
        if known is None:
            self.ranks[key] = len(self.ranks)
            self.conflicts[key] = set()
        if known is None or spec.numel > known.numel:
            known = self.specs[key] = spec
        mine = self.conflicts[key]
        for other in self._live:
            there = self.specs[other]
            if there.arena == known.arena and there.device == known.device:
                mine.add(other)
                self.conflicts[other].add(key)
        return known

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
