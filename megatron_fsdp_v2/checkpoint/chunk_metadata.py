"""Which box of a global tensor this rank holds, told to DCP without asking another rank.

DCP asks a tensor for the chunks to load (``__create_chunk_list__``) and for what to write (``__create_write_items__``).
A layout knows both, so they are attached as plain data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..sharding.dtensor import RowShard
from ..sharding.layout import RowRange

_ATTRIBUTE = "_fsdp_v2_chunks"
_SOURCE_ATTRIBUTE = "_fsdp_v2_chunk_source"
# Megatron's own preprocessing leaves tensors with this mark alone; others it would ask all ranks about.
_STOCK_MARK = "_megatron_fsdp_explicit_chunk_metadata"


class Chunk(NamedTuple):
    """A box of a global tensor: its first index and its size along every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


class ChunkError(ValueError):
    """Chunk metadata that can't be right. The message lists every offender."""


@dataclass(frozen=True)
class ChunkMetadata:
    """What a rank holds of one tensor. ``source`` tells who said so."""

    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    source: str

    def create_chunk_list(self) -> list[ChunkStorageMetadata]:
        """What DCP has to load."""
        return [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in self.chunks]

    def create_write_items(self, fqn: str, tensor: torch.Tensor) -> list[WriteItem]:
        """What DCP has to write."""
        properties = TensorProperties.create_from_tensor(_local(tensor))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.shape)),
            )
            for chunk in self.create_chunk_list()
        ]


def attach_chunk_metadata(tensor: DTensor, source: str, chunks: Sequence[Chunk] | None = None) -> DTensor:
    """Tell DCP what this rank holds of ``tensor``, by default what its placements say; returns the tensor.

    A rank without elements of it writes and loads nothing.

    Raises:
        ValueError: the chunks have other numbers of dimensions than the tensor, or more than one element is held by
            several chunks or by none.
    """
    if chunks is None:
        chunks = [local_chunk(tensor)]
    held = tuple(chunk for chunk in chunks if chunk.numel)
    if 0 in tensor.shape:
        # Someone has to write that there is such a tensor. All ranks say the same, and DCP lets one of them do it.
        held = (Chunk((0,) * tensor.ndim, tuple(tensor.shape)),)
    metadata = ChunkMetadata(tuple(tensor.shape), held, source)
    if problem := _problem(tensor, metadata):
        raise ValueError(f"chunks {list(held)} from {source!r}: {problem}")
    for owner in (tensor, tensor._local_tensor):
        vars(owner).update(
            {
                _ATTRIBUTE: metadata,
                _SOURCE_ATTRIBUTE: source,
                _STOCK_MARK: True,
                "__create_chunk_list__": metadata.create_chunk_list,
                "__create_write_items__": metadata.create_write_items,
            }
        )
    return tensor


def chunk_metadata_of(tensor: torch.Tensor) -> ChunkMetadata | None:
    """What was attached to a tensor, if anything was."""
    metadata: ChunkMetadata | None = vars(tensor).get(_ATTRIBUTE)
    return metadata


def propagate_chunk_metadata(tensor: DTensor, origin: DTensor) -> DTensor:
    """Attach to ``tensor`` what ``origin``, of the same shape and sharding, has; returns the tensor."""
    metadata = chunk_metadata_of(origin)
    if metadata is None:
        return attach_chunk_metadata(tensor, "propagate:init")
    source = metadata.source.removeprefix("propagate:")
    return attach_chunk_metadata(tensor, f"propagate:{source}", metadata.chunks)


def local_chunk(tensor: DTensor) -> Chunk:
    """The box that the placements of a tensor give this rank; arithmetic alone."""
    shape = tuple(tensor.shape)
    if shape and all(isinstance(placement, (RowShard, Replicate)) for placement in tensor.placements):
        # Torch's way to the same box takes most of the time to prepare a model of many experts.
        held = held_rows(tensor, shape[0])
        return Chunk((held.start, *[0] * (len(shape) - 1)), (held.count, *shape[1:]))
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Chunk(tuple(offsets), tuple(sizes))


def held_rows(tensor: DTensor, rows: int) -> RowRange:
    """Of the ``rows`` that a parameter has before data parallelism cuts it, those that this rank holds."""
    held = RowRange(0, rows)
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, RowShard):
            part = placement.split.range(tensor.device_mesh.get_local_rank(dim))
            held = RowRange(held.start + part.start, part.count)
    return held


def verify_chunks(state_dict: Mapping[str, Any]) -> None:
    """Check the chunk metadata of every DTensor in a nested state dict, without communication.

    Raises:
        ChunkError: some has none, reaches beyond its tensor, overlaps itself, or doesn't cover what the rank holds. The
            message lists key, shapes, chunks, source, mesh and placements of each.
    """
    problems = []
    for key, tensor in _dtensors_in(state_dict):
        metadata = chunk_metadata_of(tensor)
        problem = "no chunk metadata" if metadata is None else _problem(tensor, metadata)
        if problem:
            problems.append(f"  {key}: {problem}; {_description(tensor, metadata)}")
    if problems:
        raise ChunkError("\n".join([f"chunk metadata of {len(problems)} tensors can't be saved or loaded:", *problems]))


def _problem(tensor: DTensor, metadata: ChunkMetadata) -> str | None:
    shape, chunks = tuple(tensor.shape), metadata.chunks
    if metadata.shape != shape:
        return f"metadata is of shape {metadata.shape}"
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return f"{chunk} has another number of dimensions"
        if any(o < 0 or o + size > full for o, size, full in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return f"{chunk} reaches beyond the tensor"
    for index, chunk in enumerate(chunks):
        if any(_overlap(chunk, other) for other in chunks[:index]):
            return f"{chunk} overlaps another"
    covered, held = sum(chunk.numel for chunk in chunks), tensor._local_tensor.numel()
    return None if covered == held else f"chunks of {covered} elements, {held} are held"


def _overlap(a: Chunk, b: Chunk) -> bool:
    pairs = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(start < other + length and other < start + size for start, size, other, length in pairs)


def _description(tensor: DTensor, metadata: ChunkMetadata | None) -> str:
    mesh = tensor.device_mesh
    said = f"chunks {list(metadata.chunks)} from {metadata.source!r}" if metadata else "never attached"
    return (
        f"shape {tuple(tensor.shape)}, local shape {tuple(tensor._local_tensor.shape)}, {said}, mesh "
        f"{mesh.mesh_dim_names or ''}{tuple(mesh.shape)} at {mesh.get_coordinate()}, placements {tensor.placements}"
    )


def _dtensors_in(value: Any, path: str = "") -> Iterator[tuple[str, DTensor]]:
    if isinstance(value, DTensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _dtensors_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _dtensors_in(item, f"{path}.{index}")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
