"""Runs that save, stop and resume: 20 steps of the same 12 samples each, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.megatron.cases import Case, Record, relative_differences, weight_differences
from tests.functional.megatron.driver import run_cases
from tests.harness.spawn import RankPool, RanksFailed

STEPS = 20
STOP = 10
V2 = "--use-megatron-fsdp-v2 --data-parallel-sharding-strategy"
ZERO_3 = f"{V2} optim_grads_params"
MODEL = "--swiglu"
# Micro-batches of a size that leaves every number of ranks at least three; the loss of a token doesn't depend on it.
_MICRO_BATCH = {1: 4, 2: 2, 3: 1, 4: 1}
_SCHEDULE = f"--global-batch-size 12 --train-iters {STEPS} --eval-iters 0 --calculate-per-token-loss"
# Stock leaves the process groups of a training with their threads, so a process runs no more than a few.
_AT_ONCE = 5
_TIMEOUT = 540.0
_LEARNS = 0.05

type Ranks = Callable[[int], RankPool]
type Inspection = Callable[[Any, Any], Any]
type Records = dict[str, Record]
type Run = Callable[[int, int, list[Case]], Records]


def whole(name: str, world: int, flags: str) -> Case:
    """A run from the first step to the last, which saves nothing."""
    return Case(name, _flags(world, flags))


def saving(name: str, world: int, folder: Path, flags: str, interval: int = STOP) -> Case:
    """A run that saves in the middle, or in every interval until there, and stops there."""
    save = f"--save {folder} --save-interval {interval} --exit-interval {STOP}"
    return Case(name, _flags(world, f"{flags} {save}"), stops=True)


def loading(name: str, world: int, folder: Path, flags: str, inspect: Inspection | None = None) -> Case:
    """A run that starts from what a folder holds and goes on to the last step; `inspect` sees what was loaded."""
    return Case(name, _flags(world, f"{flags} --load {folder}"), inspect)


def train(ranks: Ranks, world: int, cases: Sequence[Case], run: Run = run_cases) -> Records:
    """Rank 0's records of all cases, by name."""
    records: Records = {}
    for first in range(0, len(cases), _AT_ONCE):
        records |= ranks(world).run(run, list(cases[first : first + _AT_ONCE]), timeout=_TIMEOUT)[0]
    return records


def refused(ranks: Ranks, case: Case) -> str:
    """What a run on two ranks says that ends with the same error on both."""
    with pytest.raises(RanksFailed) as failure:
        train(ranks, 2, [case])
    said = str(failure.value)
    assert said.count("CheckpointError: ") >= 2, said
    return said


def _flags(world: int, flags: str) -> tuple[str, ...]:
    return tuple(f"{_SCHEDULE} --micro-batch-size {_MICRO_BATCH[world]} {flags}".split())


def assert_continues(resumed: Record, unbroken: Record, exact: bool, tolerance: float = 1e-5) -> None:
    """The resumed run has the losses and final weights of one that ran through."""
    expected = unbroken.losses[-len(resumed.losses) :]
    assert len(resumed.skipped) == len(unbroken.skipped) - STOP
    assert sum(resumed.skipped) == sum(unbroken.skipped[STOP:])
    assert unbroken.losses[0] - unbroken.losses[-1] > _LEARNS, "a model that learns nothing proves nothing"
    if exact:
        assert resumed.losses == expected
        assert resumed.grad_norms == unbroken.grad_norms[-len(resumed.losses) :]
        for name, weight in unbroken.weights.items():
            assert torch.equal(resumed.weights[name], weight), name
        return
    losses = max(relative_differences(resumed.losses, expected))
    weights, name = max((value, name) for name, value in weight_differences(resumed, unbroken).items())
    print(f"losses {losses:.1e}, weights {weights:.1e} ({name})")
    assert losses <= tolerance
    assert weights <= 10 * tolerance, name
