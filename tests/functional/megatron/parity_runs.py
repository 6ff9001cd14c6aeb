"""What parity tests share: runs with v2 and with stock under the same flags, and how far apart they may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from tests.functional.megatron.cases import (
    STEPS,
    Case,
    Record,
    relative_differences,
    weight_differences,
)
from tests.functional.megatron.driver import run_cases
from tests.harness.spawn import RankPool

STOCK = "--use-distributed-optimizer"
V2 = "--use-megatron-fsdp-v2 --data-parallel-sharding-strategy"
TWO_INSTANCES = "--num-distributed-optimizer-instances 2"
_TIMEOUT = 540.0
# Stock leaves the process groups of a training with their threads, so a process runs no more than a few.
_AT_ONCE = 5

type Ranks = Callable[[int], RankPool]
type Records = dict[str, Record]


@dataclass(frozen=True)
class Variant:
    """Flags that both sides get, and how far apart they may be (relative; weights per parameter, in L2 norm)."""

    flags: str
    losses: float = 1e-6
    grad_norms: float = 1e-6
    weights: float = 1e-5
    dtype: torch.dtype = torch.float32
    stock: str = STOCK
    replica_ranks: int = 1


def cases_of(
    pairs: Iterable[tuple[str, str]], variants: Mapping[str, Variant], strategies: Mapping[str, str]
) -> list[Case]:
    """Every pair of variant and strategy as a run with v2, and one stock run for each variant among them."""
    pairs = list(pairs)
    names = dict.fromkeys(variant for variant, _ in pairs)
    runs = [
        *[(f"stock: {name}", name, variants[name].stock) for name in names],
        *[(f"{name}: {strategy}", name, f"{V2} {strategies[strategy]}") for name, strategy in pairs],
    ]
    return [
        Case(title, tuple(f"{flags} {variants[name].flags}".split()), replica_ranks=variants[name].replica_ranks)
        for title, name, flags in runs
    ]


def train(pool: RankPool, cases: list[Case]) -> Records:
    """Rank 0's records of all cases, by name. Every rank has to have the same weights at the end."""
    records: Records = {}
    for first in range(0, len(cases), _AT_ONCE):
        by_rank = pool.run(run_cases, cases[first : first + _AT_ONCE], timeout=_TIMEOUT)
        for name, record in by_rank[0].items():
            assert {other[name].weights_checksum for other in by_rank} == {record.weights_checksum}, name
        records.update(by_rank[0])
    return records


def assert_parity(
    records: Records, variants: Mapping[str, Variant], variant: str, strategy: str, fp32_factor: float = 1.0
) -> None:
    """A run with v2 has stock's losses, gradient norms, evaluations and final weights, as close as the variant says."""
    ours, stock, limits = records[f"{variant}: {strategy}"], records[f"stock: {variant}"], variants[variant]
    factor = fp32_factor if limits.dtype is torch.float32 else 1.0
    assert (ours.wrapper, stock.wrapper) == ("PluginFSDPv2", "DistributedDataParallel")
    assert ours.skipped == stock.skipped
    assert ours.loss_scales == stock.loss_scales
    assert len(ours.skipped) == STEPS
    assert sum(ours.skipped) < STEPS - 1
    losses = max(relative_differences(ours.losses, stock.losses))
    grad_norms = max(relative_differences(ours.grad_norms, stock.grad_norms))
    evaluations = max(relative_differences(ours.evaluations, stock.evaluations))
    weights, name = max((value, name) for name, value in weight_differences(ours, stock, limits.dtype).items())
    print(
        f"{variant}, {strategy}: losses {losses:.1e}, grad norms {grad_norms:.1e}, evaluations {evaluations:.1e}, "
        f"weights {weights:.1e} ({name})"
    )
    assert losses <= factor * limits.losses
    assert grad_norms <= factor * limits.grad_norms
    assert evaluations <= factor * limits.losses
    assert weights <= limits.weights, name
