"""Tensor, sequence and context parallelism with v2 beside stock's DistributedOptimizer, and beside a run on one rank.

What stock has for them on CUDA alone has stand-ins under CPU emulation: an attention that gathers the whole sequence,
and torch's norms with the marks of sequence parallelism. Stock with those is compared with stock without.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.functional.megatron import inspections
from tests.functional.megatron.cases import STEPS, Case, Record, relative_differences, weight_differences
from tests.functional.megatron.parity_runs import (
    STOCK,
    TWO_INSTANCES,
    V2,
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
_TP2 = "--tensor-model-parallel-size 2 --log-params-norm --log-num-zeros-in-grad"
_SP = f"{_TP2} --sequence-parallel"
_LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights"
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear"


def _bf16(flags: str, replica_ranks: int = 2) -> Variant:
    limits = {"losses": 1e-3, "grad_norms": 5e-3, "weights": 1e-2}
    return Variant(f"{flags} --bf16", dtype=torch.bfloat16, replica_ranks=replica_ranks, **limits)


VARIANTS = {
    "cp 2": Variant(_CP2, replica_ranks=2),
    "cp 2, per-token loss": Variant(f"{_CP2} --calculate-per-token-loss", replica_ranks=2),
    "cp 2, overlap": Variant(f"{_CP2} --overlap-grad-reduce --overlap-param-gather", replica_ranks=2),
    "cp 2, bf16": _bf16(_CP2),
    "tp 2": Variant(_TP2, replica_ranks=2),
    "tp 2, dropout": Variant(f"{_TP2} --attention-dropout 0.1 --hidden-dropout 0.1", replica_ranks=2),
    "tp 2, bf16": _bf16(_TP2),
    "tp 2, sp": Variant(_SP, replica_ranks=2),
    "tp 2, sp, llama-like": Variant(f"{_SP} {_LLAMA}", replica_ranks=2),
    "tp 2, sp, overlap": Variant(f"{_SP} --overlap-grad-reduce --overlap-param-gather", replica_ranks=2),
    "tp 2, sp, recomputation": Variant(
        f"{_SP} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", replica_ranks=2
    ),
    "tp 2, sp, per-token loss": Variant(f"{_SP} --calculate-per-token-loss", replica_ranks=2),
    "tp 2, sp, experts": Variant(f"{_SP} {_EXPERTS}", replica_ranks=2),
    "tp 2, sp, bf16": _bf16(_SP),
    "tp 2, sp, fp16": Variant(
        f"{_SP} --fp16 --initial-loss-scale 1048576 --loss-scale-window 3 --accumulate-allreduce-grads-in-fp32",
        losses=1e-3,
        grad_norms=1e-3,
        weights=1e-2,
        dtype=torch.float16,
        replica_ranks=2,
    ),
    "tp 2 x cp 2, sp": Variant(f"{_SP} {_CP2}", replica_ranks=4),
}
AT_TWO_RANKS = [
    ("cp 2", "optim"),
    ("cp 2, per-token loss", ZERO_3),
    ("tp 2", ZERO_3),
    ("tp 2, sp", "optim"),
    ("tp 2, sp, llama-like", ZERO_3),
    ("tp 2, sp, experts", ZERO_3),
]
AT_FOUR_RANKS = [
    ("cp 2", "hsdp"),
    *[("tp 2, sp, llama-like", strategy) for strategy in ("no_shard", "optim", "optim_grads_params", "hsdp", "hfsdp")],
    ("tp 2, sp, bf16", ZERO_3),
    ("tp 2 x cp 2, sp", ZERO_3),
]
EVERY_PAIR = [pair for pair in product(VARIANTS, STRATEGIES) if pair not in AT_FOUR_RANKS]


@pytest.fixture(scope="module")
def two_ranks(ranks: Ranks) -> Records:
    return train(ranks(2), cases_of(AT_TWO_RANKS, VARIANTS, STRATEGIES))


@pytest.fixture(scope="module")
def four_ranks(ranks: Ranks) -> Records:
    return train(ranks(4), cases_of(AT_FOUR_RANKS, VARIANTS, STRATEGIES))


@pytest.fixture(scope="module")
def every_pair(ranks: Ranks) -> Records:
    return train(ranks(4), cases_of(EVERY_PAIR, VARIANTS, STRATEGIES))


@pytest.mark.parametrize(("variant", "strategy"), AT_TWO_RANKS)
def test_two_ranks_train_as_stock(two_ranks: Records, variant: str, strategy: str) -> None:
    assert_parity(two_ranks, VARIANTS, variant, strategy)
    _assert_same_statistics(two_ranks[f"{variant}: {strategy}"], two_ranks[f"stock: {variant}"])


@pytest.mark.parametrize(("variant", "strategy"), AT_FOUR_RANKS)
def test_four_ranks_train_as_stock(four_ranks: Records, variant: str, strategy: str) -> None:
    assert_parity(four_ranks, VARIANTS, variant, strategy, fp32_factor=10.0)
    if VARIANTS[variant].dtype is torch.float32:
        _assert_same_statistics(four_ranks[f"{variant}: {strategy}"], four_ranks[f"stock: {variant}"])


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("variant", "strategy"), EVERY_PAIR)
def test_four_ranks_train_as_stock_in_every_pair(every_pair: Records, variant: str, strategy: str) -> None:
    assert_parity(every_pair, VARIANTS, variant, strategy, fp32_factor=10.0)


def _assert_same_statistics(ours: Record, stock: Record) -> None:
    """Norms of weights and zeros of gradients count what tensor-parallel ranks share once."""
    logged = [norm for norm in ours.params_norms if norm is not None]
    assert len(logged) in (0, STEPS)
    assert (
        max(relative_differences(logged, [norm for norm in stock.params_norms if norm is not None]), default=0) < 1e-6
    )
    assert ours.zeros_in_grad == stock.zeros_in_grad


ALONE = "--use-cpu-initialization --calculate-per-token-loss"


@pytest.fixture(scope="module")
def from_the_same_weights(ranks: Ranks) -> Records:
    """With weights that don't depend on the number of ranks: one rank, and two that share its work."""
    alone = [Case("stock, alone", tuple(f"{STOCK} {ALONE}".split()))]
    shared = {"cp 2": _CP2, "tp 2": "--tensor-model-parallel-size 2", "tp 2, sp": _SP}
    cases = [
        Case(f"{kind}, {name}", tuple(f"{side} {ALONE} {flags}".split()), replica_ranks=2)
        for name, flags in shared.items()
        for kind, side in (("stock", STOCK), ("v2", f"{V2} {ZERO_3}"))
    ]
    return train(ranks(1), alone) | train(ranks(2), cases)


@pytest.mark.parametrize("name", ["cp 2", "tp 2", "tp 2, sp"])
@pytest.mark.parametrize("kind", ["stock", "v2"])
def test_two_ranks_train_as_one(from_the_same_weights: Records, kind: str, name: str) -> None:
    """Stock with the stand-ins is stock without them, and a parameter's public view is the whole one."""
    alone, shared = from_the_same_weights["stock, alone"], from_the_same_weights[f"{kind}, {name}"]
    assert max(relative_differences(shared.losses, alone.losses)) < 1e-5
    assert max(relative_differences(shared.grad_norms, alone.grad_norms)) < 1e-4
    assert max(weight_differences(shared, alone).values()) < 1e-4
    assert alone.losses[-1] < alone.losses[0] - 0.05


_FACTS = f"{V2} {ZERO_3} {_SP} {_LLAMA} --train-iters 3"
INSPECTED = [
    Case("facts", tuple(_FACTS.split()), inspections.tensor_parallel_facts, replica_ranks=2),
    Case("meta", (*_FACTS.split(), "--init-model-with-meta-device"), inspections.repeated_parts, replica_ranks=2),
]


@pytest.fixture(scope="module")
def inspected(ranks: Ranks) -> Records:
    return train(ranks(4), INSPECTED)


def test_facts_of_tensor_parallelism_are_kept(inspected: Records) -> None:
    facts = inspected["facts"].inspected
    column = facts["decoder.layers.0.mlp.linear_fc1.weight"]
    assert column == ((144, 32), (72, 32), "tp: S(0), dp_shard: rows", True, 0, 2, False)
    row = facts["decoder.layers.0.mlp.linear_fc2.weight"]
    assert row == ((32, 72), (32, 36), "tp: S(1), dp_shard: rows", True, 1, 1, False)
    norm = facts["decoder.layers.0.input_layernorm.weight"]
    assert norm == ((32,), (32,), "tp: R, dp_shard: rows", False, -1, 1, True)


def test_parts_of_a_weight_built_on_meta_differ(inspected: Records) -> None:
    assert inspected["meta"].inspected == []
    assert inspected["meta"].losses[-1] < inspected["meta"].losses[0]
