"""The one place that knows whether the device has streams.

Communication gets streams of its own, so that it runs beside compute. Memory of gathered weights is allocated, filled
and freed on the gather stream; compute waits for an event before it reads, and the gather stream waits for an event of
compute before the memory is used again. Collected gradients are allocated and freed on the compute stream, which waits
for the reduce stream first. On a device without streams collectives run asynchronously and waiting is done by the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ..sharding.collectives import Work


class Pending(Protocol):
    """Communication that was issued. ``wait`` makes its result usable on the present stream."""

    def wait(self) -> None: ...


class Streams:
    """Streams of a device without streams: everything is ordered by the host."""

    def gather_scope(self) -> AbstractContextManager[Any]:
        """Where gathers are issued and gathered memory is allocated and freed."""
        return nullcontext()

    def gather_after_compute(self, event: Any = None) -> None:
        """Order later gathers behind what compute was given so far, or up to an event it recorded."""

    def issued_gather(self, works: list[Work]) -> Pending:
        """Turn just issued gathers into something compute can wait on."""
        return _HostGather(works)

    def run_reduction(self, stages: Iterator[Work]) -> Pending:
        """Start a reduction given as an iterator over its collectives."""
        return _HostReduction(stages)

    def synchronize(self) -> None:
        """Wait until the device did all that it was given."""

    def release_cached_memory(self) -> None:
        """Give freed memory that torch keeps for later back to the device, where other processes find it."""


def streams_for(device: torch.device) -> Streams:
    """The seam for ``device``."""
    return Streams() if device.type == "cpu" else DeviceStreams(device)


class DeviceStreams(Streams):
    """One stream for gathers and one for reductions."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._gather = self._module.Stream(device=device, priority=-1)
        self._reduce = self._module.Stream(device=device, priority=-1)

    def gather_scope(self) -> AbstractContextManager[Any]:
        return self._module.stream(self._gather)  # type: ignore[no-any-return]

    def gather_after_compute(self, event: Any = None) -> None:
        if event is None:
            self._gather.wait_stream(self._module.current_stream())
        else:
            self._gather.wait_event(event)

    def issued_gather(self, works: list[Work]) -> Pending:
        for work in works:
            work.wait()
        return _DeviceEvent(self._module, self._gather.record_event())

    def run_reduction(self, stages: Iterator[Work]) -> Pending:
        self._reduce.wait_stream(self._module.current_stream())
        with self._module.stream(self._reduce):
            for work in stages:
                work.wait()
            return _DeviceEvent(self._module, self._reduce.record_event())

    def synchronize(self) -> None:
        self._module.synchronize()

    def release_cached_memory(self) -> None:
        self._module.empty_cache()


class _HostGather:
    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _HostReduction:
    """Holds the collective in flight; waiting finishes it and runs what follows."""

    def __init__(self, stages: Iterator[Work]) -> None:
        self._stages = stages
        self._work = next(stages, None)

    def wait(self) -> None:
        while self._work is not None:
            self._work.wait()
            self._work = next(self._stages, None)


class _DeviceEvent:
    def __init__(self, module: Any, event: Any) -> None:
        self._module = module
        self._event = event

    def wait(self) -> None:
        self._module.current_stream().wait_event(self._event)
