"""What a wrapper costs the host: a fake process group of 8 ranks that sends nothing, and units that compute little."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn

from .models import TinyStack
from .ranks import Tell, run_on_ranks
from .results import PLAIN, HostFigures
from .variants import HOST_VARIANTS, Variant

WORLD_SIZE = 8
UNITS = 48
WARMUP = 4


def run(rounds: int, tell: Tell) -> list[HostFigures]:
    """Measure the plain modules and all variants in turn, ``rounds`` times."""
    return run_on_ranks(measure, 1, WORLD_SIZE, "fake", tell, rounds)[0]


def measure(tell: Tell, rounds: int) -> list[HostFigures]:
    """The part of the process that stands for all ranks."""
    models = {PLAIN: TinyStack(UNITS), **{variant.name: _wrapped(variant) for variant in HOST_VARIANTS}}
    results = [HostFigures(name) for name in models]
    for model in models.values():
        for _ in range(WARMUP):
            timed_pass(model)
    with no_collection():
        for number in range(rounds):
            if number % 10 == 0:
                tell(f"timed round {number + 1} of {rounds}")
            for figures, model in zip(results, models.values(), strict=True):
                forward, backward = timed_pass(model)
                figures.forward.append(forward)
                figures.backward.append(backward)
                gc.collect(0)
    return results


def timed_pass(model: nn.Module, units: int = UNITS) -> tuple[float, float]:
    """One forward and one backward of so many units from cleared gradients; microseconds per unit of each."""
    model.zero_grad(set_to_none=True)
    x = torch.ones(1, 8, requires_grad=True)
    start = time.thread_time()
    loss = model(x).sum()
    middle = time.thread_time()
    loss.backward()
    end = time.thread_time()
    return (middle - start) / units * 1e6, (end - middle) / units * 1e6


def _wrapped(variant: Variant) -> nn.Module:
    model = TinyStack(UNITS)
    return variant.wrap(model, list(model.units))


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage between passes only: a full collection inside one would be charged to whoever is running."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
