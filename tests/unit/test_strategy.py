"""Strategies as placements."""

from __future__ import annotations

import itertools

import pytest

from megatron_fsdp_v2.sharding.gradients import _stage_placements
from megatron_fsdp_v2.strategy import OUTER_STRATEGIES, SHARD_STRATEGIES, Placement, resolve_strategy

REPLICATED, PARTIAL, SHARDED = Placement.REPLICATED, Placement.PARTIAL, Placement.SHARDED


@pytest.mark.parametrize(
    ("name", "compute", "grads", "main", "deferred"),
    [
        ("no_shard", REPLICATED, REPLICATED, REPLICATED, True),
        ("optim", REPLICATED, SHARDED, SHARDED, True),
        ("optim_grads", REPLICATED, SHARDED, SHARDED, False),
        ("optim_grads_params", SHARDED, SHARDED, SHARDED, False),
    ],
)
def test_the_shard_axis(name: str, compute: Placement, grads: Placement, main: Placement, deferred: bool) -> None:
    axis = resolve_strategy(name, "no_shard", has_outer_axis=False).shard
    assert (axis.compute, axis.grads, axis.main, axis.deferred) == (compute, grads, main, deferred)


@pytest.mark.parametrize("name", SHARD_STRATEGIES)
@pytest.mark.parametrize("outer", OUTER_STRATEGIES)
def test_the_outer_axis_always_computes_with_replicas_and_waits_for_the_step(name: str, outer: str) -> None:
    if (name, outer) == ("no_shard", "optim"):
        with pytest.raises(ValueError, match="outer_strategy='optim' shards what strategy='no_shard' keeps whole"):
            resolve_strategy(name, outer, has_outer_axis=True)
        return
    axis = resolve_strategy(name, outer, has_outer_axis=True).outer
    assert axis is not None
    kept = SHARDED if outer == "optim" else REPLICATED
    assert (axis.compute, axis.grads, axis.main, axis.deferred) == (REPLICATED, kept, kept, True)


@pytest.mark.parametrize("name", SHARD_STRATEGIES)
def test_only_zero_3_gathers_for_every_use(name: str) -> None:
    strategy = resolve_strategy(name, "no_shard", has_outer_axis=True)
    assert strategy.weights_resharded == (name == "optim_grads_params")


@pytest.mark.parametrize("name", SHARD_STRATEGIES)
@pytest.mark.parametrize("outer", [None, *OUTER_STRATEGIES])
def test_gradients_are_reduced_along_one_axis_at_a_time(name: str, outer: str | None) -> None:
    if (name, outer) == ("no_shard", "optim"):
        pytest.skip("refused")
    strategy = resolve_strategy(name, outer or "no_shard", has_outer_axis=outer is not None)
    stages = _stage_placements(strategy)
    assert len(stages) == (2 if outer is None else 3)
    assert set(stages[0]) <= {PARTIAL, None}
    assert PARTIAL not in stages[-1]
    for before, after in itertools.pairwise(stages):
        changed = [index for index in range(2) if before[index] is not after[index]]
        assert len(changed) == 1
        assert before[changed[0]] is PARTIAL


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match="strategy='zero3' is unknown; choose one of no_shard, optim"):
        resolve_strategy("zero3", "no_shard", has_outer_axis=False)
    with pytest.raises(ValueError, match="outer_strategy='optim_grads' is unknown"):
        resolve_strategy("optim", "optim_grads", has_outer_axis=True)
    with pytest.raises(ValueError, match="needs a 2-D mesh"):
        resolve_strategy("optim", "optim", has_outer_axis=False)
