"""Training with v2 beside stock's DistributedOptimizer: same data, same seed, 10 steps of 3 micro-batches.

`make test` runs every strategy on the plain model and every variant with ZeRO-3 (some with ZeRO-1 too, whose gradients
take another way); the marker `full` adds every strategy with every variant.
"""

from __future__ import annotations

import pytest
import torch

from tests.functional.megatron.cases import STEPS, relative_differences
from tests.functional.megatron.parity_runs import (
    TWO_INSTANCES,
    Ranks,
    Records,
    Variant,
    assert_parity,
    cases_of,
    train,
)
from tests.harness.spawn import RankPool

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")

_BF16 = {"losses": 1e-3, "grad_norms": 5e-3, "weights": 1e-2, "dtype": torch.bfloat16}
_RECOMPUTE_ALL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention --num-query-groups 1"
VARIANTS = {
    # Clipping is on and takes effect, and biases and norms have no weight decay.
    "plain": Variant(""),
    "overlap": Variant("--overlap-grad-reduce --overlap-param-gather"),
    "dropout": Variant("--attention-dropout 0.1 --hidden-dropout 0.1"),
    "full recomputation": Variant(_RECOMPUTE_ALL),
    "full recomputation with dropout": Variant(f"{_RECOMPUTE_ALL} --attention-dropout 0.1 --hidden-dropout 0.1"),
    "selective recomputation": Variant("--recompute-granularity selective"),
    "evaluation in between": Variant("--eval-interval 3 --eval-iters 2"),
    "evaluation in between, overlap": Variant(
        "--eval-interval 3 --eval-iters 2 --overlap-grad-reduce --overlap-param-gather"
    ),
    "per-token loss": Variant("--calculate-per-token-loss"),
    "per-token loss, overlap": Variant("--calculate-per-token-loss --overlap-grad-reduce"),
    "untied": Variant("--untie-embeddings-and-output-weights"),
    "llama-like": Variant(_LLAMA),
    "experts": Variant(
        "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type aux_loss "
        "--disable-bias-linear"
    ),
    "no clipping": Variant("--clip-grad 0"),
    "norms and zeros logged": Variant(
        "--log-params-norm --log-num-zeros-in-grad --untie-embeddings-and-output-weights"
    ),
    # Stock's DistributedOptimizer refuses SGD; its plain data parallelism doesn't.
    "sgd": Variant("--optimizer sgd", stock="--accumulate-allreduce-grads-in-fp32"),
    "bf16": Variant("--bf16", **_BF16),  # type: ignore[arg-type]
    "bf16, overlap": Variant("--bf16 --overlap-grad-reduce --overlap-param-gather", **_BF16),  # type: ignore[arg-type]
    "bf16, full recomputation": Variant(f"--bf16 {_RECOMPUTE_ALL}", **_BF16),  # type: ignore[arg-type]
    # Stock adds micro-batches in bf16 then, v2 in fp32.
    "bf16 communication": Variant(
        "--bf16 --grad-reduce-in-bf16", losses=1e-3, grad_norms=1e-2, weights=5e-2, dtype=torch.bfloat16
    ),
    "fp16, dynamic scale": Variant(
        "--fp16 --initial-loss-scale 1048576 --loss-scale-window 3 --accumulate-allreduce-grads-in-fp32",
        losses=1e-3,
        grad_norms=1e-3,
        weights=1e-2,
        dtype=torch.float16,
    ),
    "fp16, constant scale": Variant(
        "--fp16 --loss-scale 128 --accumulate-allreduce-grads-in-fp32",
        losses=1e-3,
        grad_norms=1e-3,
        weights=1e-2,
        dtype=torch.float16,
    ),
}
ALSO_WITH_ZERO1 = (
    "overlap",
    "full recomputation",
    "evaluation in between",
    "per-token loss",
    "bf16",
    "fp16, dynamic scale",
)
AT_TWO_RANKS = [
    *[("plain", strategy) for strategy in STRATEGIES],
    *[(variant, "optim_grads_params") for variant in VARIANTS if variant != "plain"],
    *[(variant, "optim") for variant in ALSO_WITH_ZERO1],
]
EVERY_PAIR = [
    (variant, strategy) for variant in VARIANTS for strategy in STRATEGIES if (variant, strategy) not in AT_TWO_RANKS
]

LAYOUTS = {
    "flat": "optim_grads_params",
    "hsdp": f"optim_grads_params {TWO_INSTANCES}",
    "hfsdp": f"optim_grads_params {TWO_INSTANCES} --outer-dp-sharding-strategy optim",
    "hsdp, zero-1": f"optim {TWO_INSTANCES}",
    "hsdp, zero-2": f"optim_grads {TWO_INSTANCES}",
}
AT_FOUR_RANKS = [
    *[("plain", layout) for layout in LAYOUTS],
    *[(variant, layout) for variant in ("overlap", "per-token loss") for layout in ("hsdp", "hfsdp")],
    *[("bf16", layout) for layout in ("hsdp", "hfsdp")],
]
EVERY_LAYOUT = [
    (variant, layout) for variant in VARIANTS for layout in LAYOUTS if (variant, layout) not in AT_FOUR_RANKS
]


_STRATEGY_FLAGS = {strategy: strategy for strategy in STRATEGIES}


def _train(pool: RankPool, pairs: list[tuple[str, str]], strategies: dict[str, str]) -> Records:
    return train(pool, cases_of(pairs, VARIANTS, strategies))


@pytest.fixture(scope="module")
def two_ranks(ranks: Ranks) -> Records:
    return _train(ranks(2), AT_TWO_RANKS, _STRATEGY_FLAGS)


@pytest.fixture(scope="module")
def every_pair(ranks: Ranks) -> Records:
    return _train(ranks(2), EVERY_PAIR, _STRATEGY_FLAGS)


@pytest.fixture(scope="module")
def four_ranks(ranks: Ranks) -> Records:
    return _train(ranks(4), AT_FOUR_RANKS, LAYOUTS)


@pytest.fixture(scope="module")
def every_layout(ranks: Ranks) -> Records:
    return _train(ranks(4), EVERY_LAYOUT, LAYOUTS)


@pytest.mark.parametrize(("variant", "strategy"), AT_TWO_RANKS)
def test_two_ranks_train_as_stock(two_ranks: Records, variant: str, strategy: str) -> None:
    assert_parity(two_ranks, VARIANTS, variant, strategy)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("variant", "strategy"), EVERY_PAIR)
def test_two_ranks_train_as_stock_in_every_pair(every_pair: Records, variant: str, strategy: str) -> None:
    assert_parity(every_pair, VARIANTS, variant, strategy)


@pytest.mark.parametrize(("variant", "layout"), AT_FOUR_RANKS)
def test_four_ranks_train_as_stock(four_ranks: Records, variant: str, layout: str) -> None:
    assert_parity(four_ranks, VARIANTS, variant, layout, fp32_factor=10.0)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("variant", "layout"), EVERY_LAYOUT)
def test_four_ranks_train_as_stock_in_every_layout(every_layout: Records, variant: str, layout: str) -> None:
    assert_parity(every_layout, VARIANTS, variant, layout, fp32_factor=10.0)


def test_runs_learn_and_differ_where_they_should(two_ranks: Records) -> None:
    """Agreement says little if the loss doesn't move, or if a variant's flags had no effect."""
    for name, record in two_ranks.items():
        assert record.losses[-1] < record.losses[0] - 0.01 or "fp16, dynamic" in name, name
    plain = two_ranks["stock: plain"].losses
    for name in ("dropout", "per-token loss", "untied", "llama-like", "experts", "no clipping", "sgd", "bf16"):
        assert two_ranks[f"stock: {name}"].losses[1:] != plain[1:], name
    assert len(two_ranks["stock: evaluation in between"].evaluations) > len(two_ranks["stock: plain"].evaluations)
    assert max(two_ranks["stock: plain"].grad_norms) > 0.5, "clipping never took effect"
    assert 0 < sum(two_ranks["stock: fp16, dynamic scale"].skipped) < STEPS - 1


def test_logged_norms_and_zeros_agree(two_ranks: Records) -> None:
    ours = two_ranks["norms and zeros logged: optim_grads_params"]
    stock = two_ranks["stock: norms and zeros logged"]
    norms = [norm for norm in ours.params_norms if norm is not None]
    assert len(norms) == STEPS
    assert max(relative_differences(norms, [norm or 0.0 for norm in stock.params_norms])) < 1e-6
    assert ours.zeros_in_grad == stock.zeros_in_grad
    assert max(stock.zeros_in_grad) > 0
