"""Context parallelism with v2 beside stock's DistributedOptimizer, and beside a run on one rank.

Stock's attention for context parallelism needs CUDA; under CPU emulation one that gathers the whole sequence stands in.
"""

from __future__ import annotations

import pytest
import torch

from tests.functional.megatron.cases import relative_differences, weight_differences
from tests.functional.megatron.parity_runs import (
    TWO_INSTANCES,
    Ranks,
    Records,
    Variant,
    assert_parity,
    cases_of,
    train,
)

ZERO_3 = "optim_grads_params"
STRATEGIES = {
    "no_shard": "no_shard",
    "optim": "optim",
    "optim_grads": "optim_grads",
    "optim_grads_params": ZERO_3,
    "hsdp": f"{ZERO_3} {TWO_INSTANCES}",
    "hfsdp": f"{ZERO_3} {TWO_INSTANCES} --outer-dp-sharding-strategy optim",
}
_CP2 = "--context-parallel-size 2"
VARIANTS = {
    "cp 2": Variant(_CP2, replica_ranks=2),
    "cp 2, per-token loss": Variant(f"{_CP2} --calculate-per-token-loss", replica_ranks=2),
    "cp 2, overlap": Variant(f"{_CP2} --overlap-grad-reduce --overlap-param-gather", replica_ranks=2),
    "cp 2, bf16": Variant(
        f"{_CP2} --bf16", losses=1e-3, grad_norms=5e-3, weights=1e-2, dtype=torch.bfloat16, replica_ranks=2
    ),
    "one rank, per-token loss": Variant("--calculate-per-token-loss"),
}
AT_TWO_RANKS = [("cp 2", ZERO_3), ("cp 2, per-token loss", ZERO_3), ("cp 2", "optim")]
AT_FOUR_RANKS = [("cp 2", "optim_grads_params"), ("cp 2", "hsdp"), ("cp 2, bf16", "optim_grads_params")]


@pytest.fixture(scope="module")
def two_ranks(ranks: Ranks) -> Records:
    return train(ranks(2), cases_of(AT_TWO_RANKS, VARIANTS, STRATEGIES))


@pytest.fixture(scope="module")
def four_ranks(ranks: Ranks) -> Records:
    return train(ranks(4), cases_of(AT_FOUR_RANKS, VARIANTS, STRATEGIES))


@pytest.mark.parametrize(("variant", "strategy"), AT_TWO_RANKS)
def test_two_ranks_train_as_stock(two_ranks: Records, variant: str, strategy: str) -> None:
    assert_parity(two_ranks, VARIANTS, variant, strategy)


@pytest.mark.parametrize(("variant", "strategy"), AT_FOUR_RANKS)
def test_four_ranks_train_as_stock(four_ranks: Records, variant: str, strategy: str) -> None:
    assert_parity(four_ranks, VARIANTS, variant, strategy, fp32_factor=10.0)


def test_two_ranks_train_as_one_with_whole_sequences(two_ranks: Records, ranks: Ranks) -> None:
    """Stock against itself: the attention that stands in is the one that it stands for."""
    alone = train(ranks(1), cases_of([("one rank, per-token loss", ZERO_3)], VARIANTS, STRATEGIES))
    one, two = alone["stock: one rank, per-token loss"], two_ranks["stock: cp 2, per-token loss"]
    assert max(relative_differences(two.losses, one.losses)) < 1e-5
    assert max(relative_differences(two.grad_norms, one.grad_norms)) < 1e-5
    assert max(weight_differences(two, one).values()) < 1e-4
