"""Runs that save, stop and resume: 20 steps of the same 12 samples each, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.functional.megatron.cases import Case, Record
from tests.functional.megatron.driver import run_cases
from tests.harness.spawn import RankPool

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

type Ranks = Callable[[int], RankPool]
type Records = dict[str, Record]
type Run = Callable[[int, int, list[Case]], Records]


def whole(name: str, world: int, flags: str) -> Case:
    """A run from the first step to the last, which saves nothing."""
    return Case(name, _flags(world, flags))


def saving(name: str, world: int, folder: Path, flags: str) -> Case:
    """A run that saves in the middle and stops there."""
    save = f"--save {folder} --save-interval {STOP} --exit-interval {STOP}"
    return Case(name, _flags(world, f"{flags} {save}"), stops=True)


def loading(name: str, world: int, folder: Path, flags: str) -> Case:
    """A run that starts from what a folder holds and goes on to the last step."""
    return Case(name, _flags(world, f"{flags} --load {folder}"))


def train(ranks: Ranks, world: int, cases: Sequence[Case], run: Run = run_cases) -> Records:
    """Rank 0's records of all cases, by name."""
    records: Records = {}
    for first in range(0, len(cases), _AT_ONCE):
        records |= ranks(world).run(run, list(cases[first : first + _AT_ONCE]), timeout=_TIMEOUT)[0]
    return records


def _flags(world: int, flags: str) -> tuple[str, ...]:
    return tuple(f"{_SCHEDULE} --micro-batch-size {_MICRO_BATCH[world]} {flags}".split())
