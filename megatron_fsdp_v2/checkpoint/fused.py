"""Parameters that hold several matrices one after the other, taken apart for checkpoints.

A gated MLP keeps gate and up projection in one weight, a gated delta net six projections. Under tensor parallelism each
rank has its part of every matrix in it, so rows of the whole are in an order that depends on the number of ranks. The
matrices by themselves don't have that problem, and are what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement

from ..sharding.dtensor import RowShard, build_dtensor
from .chunk_metadata import attach_chunk_metadata, held_rows


@dataclass(frozen=True)
class FusedLayout:
    """The matrices inside a parameter: (name, rows) one after the other, rows of dim 0 on one tensor-parallel rank."""

    components: tuple[tuple[str, int], ...]

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.components)


def split_fused(tensor: DTensor, layout: FusedLayout) -> dict[str, DTensor]:
    """The matrices of a fused parameter, or of an optimizer state of its shape, as DTensors on the same memory.

    Each is sharded by rows as the parameter is; a rank without rows of one has an empty part of it. The mesh
    dimensions of data parallelism are those with a `RowShard` or, where the parameter is whole, `Replicate` placement;
    a plain `Shard(0)` before them is tensor parallelism, of which each rank has its part of every matrix.

    Raises:
        ValueError: the components don't add up to the rows of the parameter on a tensor-parallel rank.
    """
    ranks = tensor_parallel_ranks(tensor)
    if tensor.ndim == 0 or layout.rows * ranks != tensor.shape[0]:
        raise ValueError(
            f"components {layout.components} have {layout.rows} rows on each of {ranks} tensor-parallel ranks, the "
            f"parameter {tuple(tensor.shape)}"
        )
    held = held_rows(tensor, layout.rows)
    parts: dict[str, DTensor] = {}
    first = 0
    for name, rows in layout.components:
        start = min(max(held.start, first), first + rows)
        stop = max(min(held.start + held.count, first + rows), start)
        local = tensor._local_tensor.narrow(0, min(start - held.start, held.count) if stop > start else 0, stop - start)
        shape = (rows * ranks, *tensor.shape[1:])
        part = build_dtensor(local, tensor.device_mesh, _placements_of(tensor, first, rows), shape)
        parts[name] = attach_chunk_metadata(part, "split")
        first += rows
    return parts


def split_weights(weights: Mapping[str, Any], layouts: Mapping[str, FusedLayout]) -> dict[str, Any]:
    """A state dict with the matrices of fused parameters in their place, each named like the parameter and itself.

    Parameters may be DTensors or plain tensors.

    Raises:
        ValueError: the components of some don't add up to its rows.
    """
    result: dict[str, Any] = {}
    for name, value in weights.items():
        if name in layouts:
            result |= {f"{name}{part}": tensor for part, tensor in _split(value, layouts[name]).items()}
        else:
            result[name] = value
    return result


def split_states(states: Mapping[str, Any], layouts: Mapping[str, FusedLayout]) -> dict[str, dict[str, Any]]:
    """As `split_weights`, for optimizer state ``{parameter: {state: value}}``; counts of steps stay as they are."""
    result: dict[str, dict[str, Any]] = {}
    for name, values in states.items():
        for key, value in values.items():
            if name in layouts and isinstance(value, torch.Tensor) and value.ndim > 0:
                for part, tensor in _split(value, layouts[name]).items():
                    result.setdefault(f"{name}{part}", {})[key] = tensor
            else:
                result.setdefault(name, {})[key] = value
    return result


def tensor_parallel_ranks(tensor: DTensor) -> int:
    """Over how many ranks the rows of a parameter are cut by tensor parallelism, before data parallelism cuts them."""
    ranks = 1
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard(0) and not isinstance(placement, RowShard):
            ranks *= tensor.device_mesh.size(dim)
    return ranks


def _split(tensor: torch.Tensor, layout: FusedLayout) -> Mapping[str, torch.Tensor]:
    if isinstance(tensor, DTensor):
        return split_fused(tensor, layout)
    if tensor.ndim == 0 or layout.rows != tensor.shape[0]:
        raise ValueError(
            f"components {layout.components} have {layout.rows} rows, the parameter is of shape {tuple(tensor.shape)}"
        )
    parts = tensor.split([rows for _, rows in layout.components])
    return {name: part for (name, _), part in zip(layout.components, parts, strict=True)}


def _placements_of(tensor: DTensor, first: int, rows: int) -> Sequence[Placement]:
    """Placements of ``rows`` rows from ``first`` on: the same cuts, seen from where the component begins."""
    placements: list[Placement] = []
    for dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, RowShard):
            placements.append(placement)
            continue
        split = placement.split
        part = replace(split, origin=split.origin + first * split.row_numel, rows=rows)
        placements.append(RowShard(part))
        # A further cut is one of what this one gave: of the component, the rows inside it.
        inside = split.range(tensor.device_mesh.get_local_rank(dim))
        rows = part.range(tensor.device_mesh.get_local_rank(dim)).count
        first = max(first - inside.start, 0)
    return placements
