"""Cases: chunk metadata and fused parameters, on real files read back without a process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.checkpoint.chunk_metadata import (
    Chunk,
    ChunkError,
    attach_chunk_metadata,
    chunk_metadata_of,
    propagate_chunk_metadata,
    verify_chunks,
)
from megatron_fsdp_v2.checkpoint.fused import FusedLayout, split_fused
from tests.functional.core.cases_dtensor import Bag, equal, for_every_layout, sharded_bag, shared_folder
from tests.functional.core.cases_support import Ranks, case

# A gate and an up projection whose border falls inside a rank's rows, odd rows on a rank, and a gated delta net.
FUSED = (
    ((6, 4), FusedLayout((("gate", 3), ("up", 3)))),
    ((10, 4), FusedLayout((("gate", 5), ("up", 5)))),
    ((14, 4), FusedLayout((("q", 2), ("k", 2), ("v", 4), ("z", 4), ("beta", 1), ("alpha", 1)))),
    ((7,), FusedLayout((("q", 2), ("none", 0), ("k", 5)))),
)
SHAPES = tuple(shape for shape, _ in FUSED)


def parts_of(model: Any) -> dict[str, DTensor]:
    """Every matrix of every parameter of a bag."""
    parts = {}
    for index, (param, (_, layout)) in enumerate(zip(model.parameters(), FUSED, strict=True)):
        parts |= {f"{index}.{name}": part for name, part in split_fused(param.detach(), layout).items()}
    return parts


def expected_parts() -> dict[str, torch.Tensor]:
    parts = {}
    for index, (param, (_, layout)) in enumerate(zip(Bag(SHAPES).parameters(), FUSED, strict=True)):
        sizes = [rows for _, rows in layout.components]
        for (name, _), part in zip(layout.components, param.detach().split(sizes), strict=True):
            parts[f"{index}.{name}"] = part
    return parts


def _parts(ranks: Ranks, layout: str) -> None:
    """Each matrix is saved as what it is, its chunks tile it, and loading into the matrices fills the parameter."""
    bag = sharded_bag(layout, shapes=SHAPES)
    parts = parts_of(bag)
    verify_chunks(parts)
    with shared_folder(ranks) as folder:
        dcp.save(parts, checkpoint_id=folder)
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        for name, expected in expected_parts().items():
            stored = metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            assert sum(chunk.sizes.numel() for chunk in stored.chunks) == expected.numel(), (name, stored.chunks)
            whole = {name: torch.full_like(expected, -1)}
            dcp.load(whole, checkpoint_id=folder, no_dist=True)
            equal(whole[name], expected, name)
        other = sharded_bag(layout, shapes=SHAPES, start=1000)
        dcp.load(parts_of(other), checkpoint_id=folder)
    for ours, expected in zip(other.parameters(), bag.parameters(), strict=True):
        equal(ours.to_local(), expected.to_local(), "the parameter that the matrices were loaded into")


parts, parts_on_two_axes = for_every_layout(_parts)


@case(worlds=(4,))
def parts_below_tensor_parallelism(ranks: Ranks) -> None:
    """Two tensor-parallel ranks with half of every matrix, each half cut again by two data-parallel ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    bag = Bag(((14, 4), (28, 3)))
    layout = FusedLayout((("q", 1), ("k", 1), ("v", 3), ("z", 1), ("beta", 1)))
    layouts = [layout, FusedLayout(tuple((name, 2 * rows) for name, rows in layout.components))]
    tp = mesh.get_local_rank("tp")
    wholes = [param.detach().clone() for param in bag.weights]
    for index, whole in enumerate(wholes):
        local = whole.chunk(2)[tp].clone()
        bag.weights[index] = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)]))
    fully_shard(bag, mesh=mesh["dp"])
    for param, whole, fused in zip(bag.parameters(), wholes, layouts, strict=True):
        parts = split_fused(param.detach(), fused)
        verify_chunks(parts)
        halves = [half.split([rows for _, rows in fused.components]) for half in whole.chunk(2)]
        with shared_folder(ranks) as folder:
            dcp.save(parts, checkpoint_id=folder)
            for position, (name, rows) in enumerate(fused.components):
                loaded = {name: torch.empty(2 * rows, whole.shape[1])}
                dcp.load(loaded, checkpoint_id=folder, no_dist=True)
                equal(loaded[name], torch.cat([half[position] for half in halves]), name)


@case(worlds=(3,))
def metadata_is_verified(ranks: Ranks) -> None:
    """One error for all offenders, with what is needed to find them."""
    bag = sharded_bag("optim_grads_params", shapes=((7, 3), (5, 2), (4, 4), (9, 2)))
    first, second, third, fourth = [param.detach() for param in bag.parameters()]
    for tensor in (first, second, third, fourth):
        attach_chunk_metadata(tensor, "preprocess")
    state = {"model": {"right": first, "stale": second, "bare": bag.weights[2].detach(), "list": [fourth]}}
    second._local_tensor = second._local_tensor.new_empty(second._local_tensor.shape[0] + 1, 2)
    with pytest.raises(ChunkError) as caught:
        verify_chunks(state)
    text = str(caught.value)
    assert "2 tensors" in text
    for expected in ("model.stale", "model.bare", "preprocess", "(5, 2)", "RowShard", "mesh", "no chunk metadata"):
        assert expected in text, (expected, text)
    assert "model.right" not in text
    assert "model.list.0" not in text


@case(worlds=(2,))
def wrong_chunks_are_refused(ranks: Ranks) -> None:
    bag = sharded_bag("no_shard", shapes=((4, 3),))
    tensor = bag.weights[0].detach()
    for chunks, said in (
        ([Chunk((0, 0), (4, 2))], "8 elements"),
        ([Chunk((1, 0), (4, 3))], "beyond"),
        ([Chunk((0, 0), (2, 3)), Chunk((1, 0), (2, 3))], "overlaps"),
        ([Chunk((0,), (12,))], "dimensions"),
    ):
        with pytest.raises(ValueError, match=said):
            attach_chunk_metadata(tensor, "convert", chunks)
    with pytest.raises(ValueError, match="5 rows on each of 1 tensor-parallel ranks"):
        split_fused(tensor, FusedLayout((("a", 2), ("b", 3))))


@case(worlds=(2,))
def several_chunks_and_none(ranks: Ranks) -> None:
    """A rank may hold several boxes, or nothing; state takes over what its parameter has."""
    bag = sharded_bag("optim_grads_params", shapes=((1, 4),))
    tensor = attach_chunk_metadata(bag.weights[0].detach(), "init")
    metadata = chunk_metadata_of(tensor)
    assert metadata is not None
    assert len(metadata.chunks) == tensor._local_tensor.shape[0]
    counts: list[Any] = [None] * ranks.world
    dist.all_gather_object(counts, len(tensor.__create_write_items__("w", tensor)))
    assert sorted(counts) == [0, 1]
    state = propagate_chunk_metadata(torch.zeros_like(tensor), tensor)
    assert state._local_tensor._fsdp_v2_chunk_source == state._fsdp_v2_chunk_source == "propagate:init"
    assert chunk_metadata_of(propagate_chunk_metadata(torch.zeros_like(tensor), state)) == chunk_metadata_of(state)
