"""Flat buffers that have memory only while they are in use."""

from __future__ import annotations

import torch

from ..memory.allocator import BucketAllocator, BufferSpec
from .buffer import DataParallelBuffer, Placements, piece_sizes
from .layout import GroupLayout
from .mesh import DataParallelMesh


class TransientBuffer:
    """A buffer of a layout that has memory between ``acquire`` and ``free``.

    Its tensors are the same objects until a pool is planned or reset, which gives its buffers other memory: the next
    ``acquire`` returns another ``buffer`` then. ``name`` is for people.
    """

    def __init__(
        self,
        allocator: BucketAllocator,
        layout: GroupLayout,
        mesh: DataParallelMesh,
        placements: Placements,
        dtype: torch.dtype,
        device: torch.device | None = None,
        arena: str | None = None,
        name: str = "buffer",
    ) -> None:
        self._allocator = allocator
        self._layout = layout
        self._mesh = mesh
        self._placements = placements
        self._sizes = piece_sizes(layout, mesh, placements)
        self._spec = BufferSpec(sum(self._sizes), dtype, device or mesh.device, arena)
        self._name = name
        self._flat: torch.Tensor | None = None
        self.is_live = False

    def __str__(self) -> str:
        return self._name

    @property
    def buffer(self) -> DataParallelBuffer:
        """The buffer, which must not be read or written while it isn't live."""
        self._ensure_built()
        return self._buffer

    @property
    def views(self) -> list[torch.Tensor]:
        """The local rows of every parameter, shaped ``(rows, *trailing)``."""
        self._ensure_built()
        return self._views

    def _ensure_built(self) -> None:
        if self._flat is None:
            # Views can be made of live memory alone.
            self.acquire()
            self.free()

    @torch.inference_mode(False)
    def _build(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._buffer = DataParallelBuffer(self._layout, self._mesh, self._placements, flat.split(self._sizes))
        self._views = [self._buffer.param_rows(index) for index in range(len(self._layout.extents))]

    def acquire(self) -> DataParallelBuffer:
        """Give the buffer memory, with undefined contents; a live one is returned as it is."""
        if not self.is_live:
            flat = self._allocator.allocate(self, self._spec)
            self.is_live = True
            if flat is not self._flat:
                self._build(flat)
        return self._buffer

    def part_of(self, whole: DataParallelBuffer) -> DataParallelBuffer:
        """The part of another buffer of the layout that lies where this one's placements put it."""
        return DataParallelBuffer(self._layout, self._mesh, whole.placements, whole.pieces).part(self._placements)

    def reserve(self) -> None:
        """Tell the allocator that another step may acquire the buffer here."""
        if not self.is_live:
            self._allocator.reserve(self, self._spec)

    def free(self) -> None:
        """Take the memory back. Free twice is once."""
        if self.is_live:
            self.is_live = False
            self._allocator.free(self)
