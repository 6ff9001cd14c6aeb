"""Flat buffers that have memory only while they are in use."""

from __future__ import annotations

from functools import cached_property

import torch

from ..memory.allocator import BucketAllocator, BufferSpec
from .buffer import DataParallelBuffer, Placements, piece_sizes
from .layout import GroupLayout
from .mesh import DataParallelMesh


class TransientBuffer:
    """A buffer of a layout that has memory between ``acquire`` and ``free``.

    Its tensors are made at the first ``acquire`` and are the same objects ever after.
    """

    def __init__(
        self,
        allocator: BucketAllocator,
        layout: GroupLayout,
        mesh: DataParallelMesh,
        placements: Placements,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self._allocator = allocator
        self._layout = layout
        self._mesh = mesh
        self._placements = placements
        self._sizes = piece_sizes(layout, mesh, placements)
        self._spec = BufferSpec(sum(self._sizes), dtype, device or mesh.device)
        self.is_live = False

    @property
    def buffer(self) -> DataParallelBuffer:
        """The buffer, which must not be read or written while it isn't live."""
        return self._built[0]

    @property
    def views(self) -> list[torch.Tensor]:
        """The local rows of every parameter, shaped ``(rows, *trailing)``."""
        return self._built[1]

    @cached_property
    def _built(self) -> tuple[DataParallelBuffer, list[torch.Tensor]]:
        # Views can be made of live memory alone.
        flat = self._allocator.allocate(self, self._spec)
        buffer = DataParallelBuffer(self._layout, self._mesh, self._placements, flat.split(self._sizes))
        views = [buffer.param_rows(index) for index in range(len(self._layout.extents))]
        if not self.is_live:
            self._allocator.free(self)
        return buffer, views

    def acquire(self) -> DataParallelBuffer:
        """Give the buffer memory, with undefined contents; a live one is returned as it is."""
        if not self.is_live:
            self.is_live = True
            self._allocator.allocate(self, self._spec)
        return self.buffer

    def free(self) -> None:
        """Take the memory back. Free twice is once."""
        if self.is_live:
            self.is_live = False
            self._allocator.free(self)
