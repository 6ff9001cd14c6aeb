"""Storage of transient buffers: gathered weights, unreduced and main gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import NamedTuple

import torch

from .stats import AllocatorStats, ArenaTally, stats_table

# Streams whose buffers a pool may place: those of one arena are written in an order that one stream keeps.
ALL_GATHER, REDUCE_SCATTER = "all-gather", "reduce-scatter"


class BufferSpec(NamedTuple):
    """Size (elements), dtype and device of a transient buffer, and the stream that orders its uses.

    Buffers without an ``arena`` live long, such as main gradients, and never share memory with others.
    """

    numel: int
    dtype: torch.dtype
    device: torch.device
    arena: str | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class BucketAllocator(ABC):
    """Lends a 1-D tensor to each key between ``allocate`` and ``free``.

    A key gets the same tensor object, on the same storage, every time: autograd may have saved a view of a gathered
    weight in forward, and the gather for backward has to refill exactly that storage. Only ``plan`` and ``reset`` may
    give a key another tensor, and they refuse to while a key of an arena is live.
    """

    # Grows when memory that keys had may be elsewhere from now on: by plan, release with resume, and reset. What holds
    # addresses, or views of buffers that aren't live, has to be of the present generation.
    generation: int = 0

    # Whether ``plan`` still waits for a trace.
    is_tracing: bool = False

    @abstractmethod
    def allocate(self, key: Hashable, spec: BufferSpec) -> torch.Tensor:
        """Give the key's tensor memory; contents are undefined. A live key gets its tensor back unchanged.

        Raises:
            ValueError: the key had another dtype, device or arena before, or a live one asks for more elements.
        """

    @abstractmethod
    def free(self, key: Hashable) -> None:
        """Take the memory back; views of the tensor stay valid objects without memory. Free twice is once.

        Raises:
            KeyError: nothing was ever allocated for the key.
        """

    @abstractmethod
    def is_live(self, key: Hashable) -> bool:
        """Whether the key holds memory now."""

    @abstractmethod
    def reserve(self, key: Hashable, spec: BufferSpec) -> None:
        """Tell that a later step may allocate the key at this moment, though this one doesn't."""

    @abstractmethod
    def begin_trace(self) -> None:
        """Tell that a step begins like those to come: what ``plan`` knows by then is what happens from now on."""

    @abstractmethod
    def plan(self) -> None:
        """Place the buffers of arenas by what was traced.

        Raises:
            RuntimeError: a key of an arena is live; names them.
        """

    @abstractmethod
    def release(self) -> None:
        """Give memory of arenas back to the device until it's needed again. Twice is once.

        Raises:
            RuntimeError: a key of an arena is live; names them.
        """

    @abstractmethod
    def resume(self) -> None:
        """Take memory given back by ``release`` again; the first ``allocate`` does it by itself."""

    @abstractmethod
    def reset(self) -> None:
        """Forget the plan and trace anew.

        Raises:
            RuntimeError: a key of an arena is live; names them.
        """

    @abstractmethod
    def stats(self) -> AllocatorStats:
        """Figures of this rank, in bytes."""

    def dump(self) -> str:
        """The figures as a table to print."""
        return stats_table(self.stats())


class DynamicAllocator(BucketAllocator):
    """Takes memory from torch's allocator on every allocate and returns it on every free."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, torch.Tensor] = {}
        self._specs: dict[Hashable, BufferSpec] = {}
        self._live: set[Hashable] = set()
        self._tally = ArenaTally()
        self._redundant_frees = 0

    def allocate(self, key: Hashable, spec: BufferSpec) -> torch.Tensor:
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
            self._specs[key] = spec
        else:
            known = self._specs[key]
            if spec is not known and spec != known:
                tensor = self._change(key, known, spec)
            elif key not in self._live:
                tensor.untyped_storage().resize_(spec.nbytes)
        if key not in self._live:
            self._live.add(key)
            self._tally.add(spec.arena, spec.device, self._specs[key].nbytes)
        return tensor

    def _change(self, key: Hashable, known: BufferSpec, spec: BufferSpec) -> torch.Tensor:
        """A tensor of another size on the storage of a key, which only grows."""
        check_change(key, known, spec, may_grow=key not in self._live)
        tensor = self._tensors[key]
        size = max(known.nbytes, spec.nbytes)
        if key not in self._live:
            tensor.untyped_storage().resize_(size)
        if spec.numel > known.numel:
            self._specs[key] = spec
            self._tensors[key] = tensor = tensor.new_empty(0).set_(tensor.untyped_storage(), 0, (spec.numel,), (1,))
        return tensor.narrow(0, 0, spec.numel)

    def free(self, key: Hashable) -> None:
        if key in self._live:
            self._live.remove(key)
            self._tensors[key].untyped_storage().resize_(0)
            spec = self._specs[key]
            self._tally.remove(spec.arena, spec.device, spec.nbytes)
        elif key in self._tensors:
            self._redundant_frees += 1
        else:
            raise unknown_key(key)

    def is_live(self, key: Hashable) -> bool:
        return key in self._live

    def knows(self, key: Hashable) -> bool:
        """Whether the key was allocated before, and not forgotten."""
        return key in self._tensors

    def forget(self, key: Hashable) -> None:
        """Drop the tensor of a key that isn't live."""
        assert key not in self._live
        del self._tensors[key], self._specs[key]

    def live_in_arenas(self) -> list[Hashable]:
        """Live keys that belong to an arena."""
        return [key for key, spec in self._specs.items() if spec.arena is not None and key in self._live]

    def reserve(self, key: Hashable, spec: BufferSpec) -> None:
        """Nothing to note: memory is taken when it's asked for."""

    def begin_trace(self) -> None:
        """Nothing to trace: buffers aren't placed."""

    def plan(self) -> None:
        refuse_live("plan", self.live_in_arenas())

    def release(self) -> None:
        refuse_live("release", self.live_in_arenas())

    def resume(self) -> None:
        """Nothing to take: buffers that aren't live had no memory before either."""

    def reset(self) -> None:
        refuse_live("reset", self.live_in_arenas())

    def stats(self) -> AllocatorStats:
        return AllocatorStats(
            phase="dynamic",
            generation=self.generation,
            pool_bytes=self._tally.live_bytes,
            live_bytes=self._tally.live_bytes,
            peak_live_bytes=self._tally.peak_bytes,
            arenas=self._tally.arenas(),
            redundant_frees=self._redundant_frees,
        )


def check_change(key: Hashable, known: BufferSpec, spec: BufferSpec, may_grow: bool) -> None:
    """Refuse a spec that a key can't have after another one.

    Raises:
        ValueError: it differs in more than its size, or needs more memory than there can be.
    """
    if spec[1:] != known[1:]:
        raise ValueError(
            f"buffer {key} was {_described(known)} and can't become {_described(spec)}; use another key, or reset the "
            "allocator"
        )
    if spec.numel > known.numel and not may_grow:
        raise ValueError(
            f"buffer {key} has memory for {known.numel} elements and can't hold {spec.numel}; free it before, and "
            "reset a pool that was planned for the smaller size"
        )


def refuse_live(action: str, live: list[Hashable]) -> None:
    """Refuse what would take memory from under live keys.

    Raises:
        RuntimeError: there are any.
    """
    if live:
        names = ", ".join([str(key) for key in live[:8]]) + (f" and {len(live) - 8} more" if len(live) > 8 else "")
        raise RuntimeError(
            f"can't {action} the memory pool while buffers are in use: {names}; bring units to rest before"
        )


def unknown_key(key: Hashable) -> KeyError:
    """The error of freeing what never was allocated."""
    return KeyError(f"buffer {key} was never allocated, so it can't be freed")


def _described(spec: BufferSpec) -> str:
    return f"{spec.numel} x {spec.dtype} on {spec.device} (arena {spec.arena})"
