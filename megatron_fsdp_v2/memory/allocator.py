"""Storage of transient buffers: gathered weights and unreduced gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import NamedTuple

import torch


class BufferSpec(NamedTuple):
    """Size (elements), dtype and device of a transient buffer."""

    numel: int
    dtype: torch.dtype
    device: torch.device


class BucketAllocator(ABC):
    """Lends a 1-D tensor to each key between ``allocate`` and ``free``.

    A key gets the same tensor object, on the same storage, every time: autograd may have saved a view of a gathered
    weight in forward, and the gather for backward has to refill exactly that storage.
    """

    @abstractmethod
    def allocate(self, key: Hashable, spec: BufferSpec) -> torch.Tensor:
        """Give the key's tensor memory; contents are undefined. A live key gets its tensor back unchanged."""

    @abstractmethod
    def free(self, key: Hashable) -> None:
        """Take the memory back; views of the tensor stay valid objects without memory. Free twice is once."""

    @abstractmethod
    def is_live(self, key: Hashable) -> bool:
        """Whether the key holds memory now."""


class DynamicAllocator(BucketAllocator):
    """Takes memory from torch's allocator on every allocate and returns it on every free."""

    def __init__(self) -> None:
        self._tensors: dict[Hashable, torch.Tensor] = {}
        self._live: set[Hashable] = set()

    def allocate(self, key: Hashable, spec: BufferSpec) -> torch.Tensor:
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        elif key not in self._live:
            tensor.untyped_storage().resize_(spec.numel * spec.dtype.itemsize)
        self._live.add(key)
        return tensor

    def free(self, key: Hashable) -> None:
        if key in self._live:
            self._live.remove(key)
            self._tensors[key].untyped_storage().resize_(0)

    def is_live(self, key: Hashable) -> bool:
        return key in self._live
