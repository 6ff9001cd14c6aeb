"""Flat buffers with placements, and the one function that moves between placements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..memory.host_copies import host_memory
from ..offload import Rest
from ..strategy import Placement
from .collectives import Work, all_gather, all_reduce, reduce_scatter
from .layout import GroupLayout
from .mesh import DataParallelMesh


class Placements(NamedTuple):
    """Placement along the shard axis and along the outer axis (None on a 1-D mesh)."""

    shard: Placement
    outer: Placement | None


class DataParallelBuffer:
    """One flat tensor per segment of a layout, laid out by ``placements``.

    A sharded axis cuts every segment into equal pieces. With both axes sharded, a piece of the shard axis is cut
    again by the outer axis, so gathering along the outer axis yields the piece of the shard axis.

    ``pieces[s]`` is this rank's 1-D tensor of segment ``s``.
    """

    def __init__(
        self, layout: GroupLayout, mesh: DataParallelMesh, placements: Placements, pieces: Sequence[torch.Tensor]
    ) -> None:
        self.layout = layout
        self.mesh = mesh
        self.placements = placements
        self.pieces = tuple(pieces)
        self.shards, self.index = _shards_and_index(mesh, placements)

    @classmethod
    def allocate(
        cls,
        layout: GroupLayout,
        mesh: DataParallelMesh,
        placements: Placements,
        dtype: torch.dtype,
        rest: Rest | None = None,
    ) -> DataParallelBuffer:
        """A buffer with storage of its own, zero-filled so that padding is never garbage."""
        sizes = piece_sizes(layout, mesh, placements)
        if rest is None:
            flat = torch.zeros(sum(sizes), dtype=dtype, device=mesh.device)
        else:
            flat = host_memory(sum(sizes) * dtype.itemsize, rest.pinned).view(dtype).zero_()
        return cls(layout, mesh, placements, flat.split(sizes))

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    def part(self, placements: Placements) -> DataParallelBuffer:
        """This rank's part of the buffer under finer ``placements``, sharing its storage."""
        shards, index = _shards_and_index(self.mesh, placements)
        fraction = shards // self.shards
        # A finer piece is the index-th of `fraction` pieces of this one.
        offset = index - self.index * fraction
        views = []
        for piece in self.pieces:
            size = piece.numel() // fraction
            views.append(piece.narrow(0, offset * size, size))
        return DataParallelBuffer(self.layout, self.mesh, placements, views)

    def param_rows(self, param: int) -> torch.Tensor:
        """The local rows of a parameter, shaped ``(rows, *trailing)``; a view."""
        extent = self.layout.extents[param]
        shape = self.layout.shapes[param]
        rows = self.layout.split(param, self.shards).range(self.index).count
        start = self.layout.local_offset(param, self.shards, self.index)
        flat = self.pieces[extent.segment]
        size = rows * extent.row_numel
        # The local part of a parameter that ends before this piece may start past its end.
        return flat.narrow(0, min(start, flat.numel() - size), size).view(rows, *shape[1:])


def piece_sizes(layout: GroupLayout, mesh: DataParallelMesh, placements: Placements) -> list[int]:
    """Elements of this rank's piece of every segment."""
    shards, _ = _shards_and_index(mesh, placements)
    return [layout.chunk(segment, shards) for segment in range(len(layout.chunks))]


def redistribute(
    source: DataParallelBuffer, target: DataParallelBuffer, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Work | None:
    """Fill ``target`` from ``source``, whose placements differ along exactly one axis. Asynchronous.

    Sharded to replicated gathers, partial to sharded reduces and scatters with ``op``, partial to replicated reduces
    with ``op``. Source and target may share storage, and have one dtype.
    """
    axis, old, new = changed_axis(source.placements, target.placements)
    mesh_axis = source.mesh.shard if axis == 0 else source.mesh.outer
    assert mesh_axis is not None
    assert source.dtype == target.dtype
    match old, new:
        case Placement.SHARDED, Placement.REPLICATED:
            return all_gather(target.pieces, source.pieces, mesh_axis.group)
        case Placement.PARTIAL, Placement.SHARDED:
            return reduce_scatter(target.pieces, source.pieces, op, mesh_axis.group)
        case Placement.PARTIAL, Placement.REPLICATED:
            if any([t.data_ptr() != s.data_ptr() for t, s in zip(target.pieces, source.pieces, strict=True)]):
                torch._foreach_copy_(list(target.pieces), list(source.pieces))
            return all_reduce(target.pieces, op, mesh_axis.group)
    raise AssertionError(f"no transition from {old} to {new}")


def gather_together(transfers: Sequence[tuple[DataParallelBuffer, DataParallelBuffer]]) -> list[Work]:
    """Gather several (source, target) pairs with one call per process group. Asynchronous."""
    calls: dict[dist.ProcessGroup, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for source, target in transfers:
        axis, _, _ = changed_axis(source.placements, target.placements)
        mesh_axis = source.mesh.shard if axis == 0 else source.mesh.outer
        assert mesh_axis is not None
        outputs, inputs = calls.setdefault(mesh_axis.group, ([], []))
        outputs += target.pieces
        inputs += source.pieces
    works = [all_gather(outputs, inputs, group) for group, (outputs, inputs) in calls.items()]
    return [work for work in works if work is not None]


def changed_axis(old: Placements, new: Placements) -> tuple[int, Placement, Placement]:
    """The one axis (0: shard, 1: outer) along which two placements differ, and both placements along it."""
    changed = [(axis, a, b) for axis, (a, b) in enumerate(zip(old, new, strict=True)) if a is not b]
    assert len(changed) == 1, f"redistribute changes one axis at a time: {old} to {new}"
    axis, before, after = changed[0]
    assert before is not None
    assert after is not None
    return axis, before, after


def _shards_and_index(mesh: DataParallelMesh, placements: Placements) -> tuple[int, int]:
    """In how many pieces segments are cut, and which of them is this rank's."""
    shards, index = 1, 0
    if placements.shard is Placement.SHARDED:
        shards, index = mesh.shard.size, mesh.shard.index
    if placements.outer is Placement.SHARDED:
        assert mesh.outer is not None
        shards, index = shards * mesh.outer.size, index * mesh.outer.size + mesh.outer.index
    return shards, index
