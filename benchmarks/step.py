"""Training steps on two gloo ranks: time, collectives, payload, copied bytes and peak memory of every variant."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from megatron_fsdp_v2.sharding.collectives import reduce_scatter

from .counting import StepCounter
from .models import VOCABULARY, LanguageModel
from .ranks import Tell, run_on_ranks
from .results import StepFigures, StepResult
from .variants import VARIANTS, Variant

RANKS = 2
BATCH, SEQUENCE = 4, 64
WARMUP = 3


class Training:
    """One model with its optimizer and a batch that is the same for all variants and differs by rank."""

    def __init__(self, wrap: Callable[[nn.Module, list[nn.Module]], nn.Module] | None) -> None:
        torch.manual_seed(0)
        model = LanguageModel()
        self.parameter_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.model = wrap(model, list(model.blocks)) if wrap else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.batch = torch.randint(VOCABULARY, (2, BATCH, SEQUENCE), generator=generator)

    def forward_backward(self) -> float:
        """Compute gradients; the loss."""
        loss = self.model(self.batch[0], self.batch[1])
        loss.backward()
        return float(loss.detach())

    def step(self) -> float:
        """One whole step; the loss before it."""
        loss = self.forward_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def run(rounds: int, tell: Tell) -> StepResult:
    """Measure all variants; ``rounds`` timed steps of each, in turn."""
    ranks = run_on_ranks(measure, RANKS, RANKS, "gloo", tell, rounds)
    result: StepResult = ranks[0]
    for index, figures in enumerate(result.variants):
        of_ranks = [rank.variants[index] for rank in ranks]
        figures.seconds = [max(step) for step in zip(*(rank.seconds for rank in of_ranks), strict=True)]
        figures.cpu_seconds = [max(step) for step in zip(*(rank.cpu_seconds for rank in of_ranks), strict=True)]
    return result


def measure(tell: Tell, rounds: int, variants: Sequence[Variant] = VARIANTS) -> StepResult:
    """The part of one rank. Without ``rounds`` nothing is timed."""
    plain = Training(None)
    own = count(plain).written
    result = StepResult(plain.parameter_bytes, [])
    trainings = []
    for variant in variants:
        tell(f"{variant.name}: tracked memory")
        peak = tracked_peak(variant)
        tell(f"{variant.name}: collectives and copies")
        trainings.append(Training(variant.wrap))
        result.variants.append(_exact_figures(variant, count(trainings[-1]), own, peak))
    for number in range(rounds):
        tell(f"timed round {number + 1} of {rounds}")
        # Another one starts every round, so that none always runs after the same neighbour.
        for place in range(len(trainings)):
            index = (place + number) % len(trainings)
            _timed_step(trainings[index], result.variants[index])
    return result


def _exact_figures(variant: Variant, counter: StepCounter, own: Counter[str], peak: int) -> StepFigures:
    copied = Counter(counter.written)
    copied.subtract(own)
    by_operator = {name: size for name, size in copied.most_common() if size}
    by_backend = int(backend_share() * counter.payload["reduce-scatter"])
    return StepFigures(
        variant.name, variant.peer, dict(counter.calls), dict(counter.payload), by_operator, by_backend, peak
    )


def _timed_step(training: Training, figures: StepFigures) -> None:
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    figures.loss = training.step()
    figures.seconds.append(time.perf_counter() - start)
    figures.cpu_seconds.append(time.process_time() - cpu_start)


def backend_share() -> float:
    """Bytes that a bare reduce-scatter is seen to write by itself, per byte of its input.

    gloo has none of its own: it all-reduces a copy and, while the caller waits, copies the rank's part to the output.
    """
    source = torch.zeros(1024 * dist.get_world_size())
    with StepCounter() as counter:
        work = reduce_scatter([torch.empty(1024)], [source], dist.ReduceOp.SUM, dist.group.WORLD)
        assert work is not None
        work.wait()
    return counter.written.total() / counter.payload.total()


def count(training: Training) -> StepCounter:
    """Count one forward and backward, after enough steps for every buffer to be there."""
    for _ in range(WARMUP):
        training.step()
    with StepCounter() as counter:
        training.forward_backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return counter


def tracked_peak(variant: Variant) -> int:
    """Peak bytes of all tensors during the steps after the first ones, the model's and the optimizer's included."""
    # Takes seconds to import.
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    # Entered before the model exists, so that no buffer escapes it.
    with tracker:
        training = Training(variant.wrap)
        for _ in range(WARMUP):
            tracker.reset_mod_stats()
            training.step()
    tracker.reset_mod_stats()
    with tracker:
        training.step()
    return int(_total(tracker.get_tracker_snapshot("peak")))


def _total(snapshot: dict[Any, dict[Any, int]]) -> int:
    return sum(device["Total"] for device in snapshot.values())
