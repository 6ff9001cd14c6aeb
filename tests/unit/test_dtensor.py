"""The placement that carries the cut of a row-sharded tensor."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from megatron_fsdp_v2.sharding.dtensor import RowShard
from megatron_fsdp_v2.sharding.layout import RowSplit, plan_layout

SPLIT = plan_layout([(7, 3), (5,)], 3).split(0, 3)


def test_placements_with_the_same_cut_are_equal() -> None:
    other = RowSplit(SPLIT.origin, SPLIT.chunk, SPLIT.row_numel, SPLIT.rows)
    assert RowShard(SPLIT) == RowShard(other)
    assert hash(RowShard(SPLIT)) == hash(RowShard(other))


def test_another_cut_is_another_placement() -> None:
    other = plan_layout([(7, 3)], 2).split(0, 2)
    assert RowShard(SPLIT) != RowShard(other)
    assert len({RowShard(SPLIT), RowShard(other)}) == 2


def test_torch_takes_it_for_a_shard_of_rows() -> None:
    placement = RowShard(SPLIT)
    assert placement == Shard(0)
    assert Shard(0) == placement
    assert placement != Shard(1)
    assert placement != Replicate()
    assert placement.is_shard(0)
    assert not placement.is_shard(1)
    assert placement.dim == 0


def test_copies_and_pickles_keep_the_cut() -> None:
    for other in (
        copy.deepcopy(RowShard(SPLIT)),
        copy.copy(RowShard(SPLIT)),
        pickle.loads(pickle.dumps(RowShard(SPLIT))),
    ):
        assert type(other) is RowShard
        assert other.split == SPLIT
        assert other.dim == 0


def test_rows_and_offsets_are_those_of_the_cut() -> None:
    answers = [RowShard(SPLIT)._local_shard_size_and_offset(7, 3, rank) for rank in range(3)]
    assert answers == [(SPLIT.range(rank).count, SPLIT.range(rank).start) for rank in range(3)]
    assert sum(count for count, _ in answers) == 7


@pytest.mark.parametrize("with_padding", [True, False])
def test_splitting_a_whole_tensor_follows_the_cut(with_padding: bool) -> None:
    whole = torch.arange(21.0).view(7, 3)
    parts, padding = RowShard(SPLIT)._split_tensor(whole, 3, with_padding=with_padding)
    if with_padding:
        assert len({part.shape for part in parts}) == 1
        parts = [part[: part.shape[0] - pad] for part, pad in zip(parts, padding, strict=True)]
    for rank, part in enumerate(parts):
        rows = SPLIT.range(rank)
        assert torch.equal(part, whole[rows.start : rows.start + rows.count])
