"""Cases: every strategy trains as one process does, on one and two mesh axes, however micro-batches are marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import fully_shard
from tests.functional.core.cases_support import (
    STRATEGIES,
    ZERO_3,
    Duel,
    Net,
    Ranks,
    adamw,
    case,
    sgd,
    shard_net,
    squared,
)

TWO_AXES = tuple(f"{strategy}+{outer}" for strategy in STRATEGIES for outer in ("no_shard", "optim"))[:-1]
MICRO_BATCHES = 3

Marking = Callable[[Any, int], AbstractContextManager[None]]


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1)


def unmarked(model: Any, micro_batch: int) -> AbstractContextManager[None]:
    return nullcontext()


def no_sync(model: Any, micro_batch: int) -> AbstractContextManager[None]:
    return nullcontext() if micro_batch == MICRO_BATCHES - 1 else model.no_sync()


@contextmanager
def by_flag(model: Any, micro_batch: int) -> Iterator[None]:
    model.set_requires_gradient_sync(micro_batch == MICRO_BATCHES - 1)
    yield


@contextmanager
def by_all_reduce_flag(model: Any, micro_batch: int) -> Iterator[None]:
    model.set_requires_all_reduce(micro_batch == MICRO_BATCHES - 1)
    yield


@contextmanager
def finished_by_hand(model: Any, micro_batch: int) -> Iterator[None]:
    """No micro-batch is marked as the last, as in Megatron without overlap."""
    with model.no_sync():
        yield
    if micro_batch == MICRO_BATCHES - 1:
        model.finish_grad_sync()


@contextmanager
def finished_after_holding_everything(model: Any, micro_batch: int) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    if micro_batch == MICRO_BATCHES - 1:
        model.finish_grad_sync()


def train(duel: Duel, marking: Marking, steps: int = 10) -> None:
    for _ in range(steps):
        for micro_batch in range(MICRO_BATCHES):
            with marking(duel.model, micro_batch):
                duel.backward()
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def unmarked_micro_batches(ranks: Ranks, strategy: str) -> None:
    train(Duel(ranks, Net(), shard_net(strategy), optimizer=momentum), unmarked)


@case(strategies=STRATEGIES)
def micro_batches_in_no_sync(ranks: Ranks, strategy: str) -> None:
    train(Duel(ranks, Net(), shard_net(strategy)), no_sync)


@case(strategies=STRATEGIES)
def micro_batches_without_gradient_sync(ranks: Ranks, strategy: str) -> None:
    train(Duel(ranks, Net(), shard_net(strategy), optimizer=sgd), by_flag)


@case(strategies=STRATEGIES)
def gradients_finished_by_hand(ranks: Ranks, strategy: str) -> None:
    train(Duel(ranks, Net(), shard_net(strategy)), finished_by_hand)
    train(Duel(ranks, Net(), shard_net(strategy)), finished_after_holding_everything, steps=3)


def _on_two_axes(ranks: Ranks, names: str, **options: Any) -> Duel:
    strategy, _, outer = names.partition("+")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    return Duel(ranks, Net(), shard_net(strategy, mesh=mesh, outer_strategy=outer), **options)


@case(worlds=(4,), strategies=TWO_AXES)
def two_axes_unmarked(ranks: Ranks, names: str) -> None:
    train(_on_two_axes(ranks, names), unmarked)


@case(worlds=(4,), strategies=TWO_AXES)
def two_axes_marked(ranks: Ranks, names: str) -> None:
    for marking in (no_sync, by_flag, by_all_reduce_flag, finished_by_hand):
        train(_on_two_axes(ranks, names, optimizer=sgd), marking, steps=3)


class Tiny(nn.Module):
    """Two rows in all: from three ranks on some rank owns nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., :3] @ self.weight.t()


@case(strategies=STRATEGIES)
def a_rank_that_owns_nothing(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Tiny(), lambda model: fully_shard(model, strategy=strategy))
    train(duel, unmarked)
    if strategy == ZERO_3:
        owned = duel.model.weight.to_local().shape[0]
        assert owned == {1: (2,), 2: (1, 1), 3: (1, 1, 0), 4: (1, 1, 0, 0)}[ranks.world][ranks.rank]


class Constant(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.weight * gradient).sum()


def _gradient_after(model: Any, gradients: list[float], marking: Marking) -> float:
    for index, gradient in enumerate(gradients):
        with marking(model, index + MICRO_BATCHES - len(gradients)):
            model(gradient).backward()
    local = model.weight.grad.to_local()
    assert local.numel() == 0 or local.min() == local.max()
    return float(local.flatten()[0]) if local.numel() else float("nan")


@case(worlds=(2,), strategies=STRATEGIES)
def averaging_reaches_every_micro_batch_once(ranks: Ranks, strategy: str) -> None:
    """Field case R23: the sum over ranks is 1 in each micro-batch, the averages add up to 0.5 each."""
    for count in (1, 2, 3):
        for marking in (unmarked, no_sync, by_flag):
            model = fully_shard(Constant(), strategy=strategy)
            got = _gradient_after(model, [float(ranks.rank == 0)] * count, marking)
            assert got == 0.5 * count, (count, marking.__name__, got)


@case(worlds=(4,), strategies=TWO_AXES)
def hybrid_sharding_keeps_every_micro_batch(ranks: Ranks, names: str) -> None:
    """Field case R24: micro-batch gradients 1, 2, 4 on one rank of a 2x2 mesh."""
    strategy, _, outer = names.partition("+")
    mesh = init_device_mesh("cpu", (2, 2))
    for marking in (unmarked, no_sync, by_flag, by_all_reduce_flag):
        model = fully_shard(Constant(), mesh=mesh, strategy=strategy, outer_strategy=outer)
        got = _gradient_after(model, [value * (ranks.rank == 0) for value in (1.0, 2.0, 4.0)], marking)
        assert got == 7 / 4, (marking.__name__, got)


@case(worlds=(2, 3), strategies=STRATEGIES)
def gradients_are_scaled_as_asked(ranks: Ranks, strategy: str) -> None:
    world = ranks.world
    for options, factor in (
        ({"grad_reduction": "sum"}, 1.0),
        ({"grad_reduction": "sum", "grad_divisor": 4.0}, 1 / 4),
        ({"grad_divisor": 4.0}, 1 / (4 * world)),
    ):
        model = fully_shard(Constant(), strategy=strategy, **options)
        got = _gradient_after(model, [1.0, 3.0], unmarked)
        expected = 4.0 * world * factor
        assert got != got or abs(got - expected) < 1e-6, (options, got)
    model = fully_shard(Constant(), strategy=strategy)
    model.set_gradient_divide_factor(8.0)
    got = _gradient_after(model, [1.0, 3.0], unmarked)
    assert got != got or abs(got - 4.0 * world / 8) < 1e-6
    model.scale_gradients(torch.tensor(0.5))
    local = model.weight.grad.to_local()
    assert local.numel() == 0 or abs(float(local.flatten()[0]) - 4.0 * world / 16) < 1e-6


@case()
def adam_makes_no_step_of_its_own(ranks: Ranks) -> None:
    """Field case R18: state is created by the first real step, so bias correction counts from one."""
    for decay in (0.0, 0.1):
        for kind in (torch.optim.Adam, torch.optim.AdamW):
            duel = Duel(
                ranks,
                nn.Linear(4, 4),
                fully_shard,
                optimizer=lambda params, kind=kind, decay=decay: kind(params, lr=0.1, weight_decay=decay),
                inputs=lambda: torch.ones(ranks.world, 2, 4),
            )
            duel.backward(squared)
            assert not duel.optimizer.state, "state exists before the first step"
            duel.step()
            duel.compare_weights()
            assert all(float(state["step"]) == 1 for state in duel.optimizer.state.values())


@case(worlds=(2,), strategies=STRATEGIES)
def empty_parameters_are_no_obstacle(ranks: Ranks, strategy: str) -> None:
    """Field case R12: the last parameter is empty on rank 1, and one has no element at all."""

    class WithEmpty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))
            self.one = nn.Parameter(torch.randn(1))
            self.none = nn.Linear(8, 0, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x[..., :3] @ self.weight.t() + self.one
            return torch.cat([y, self.none(torch.cat([x, x], -1)[..., :8])], dim=-1)

    for optimizer in (adamw, last_empty_ends_the_list):
        duel = Duel(ranks, WithEmpty(), lambda model: fully_shard(model, strategy=strategy), optimizer=optimizer)
        duel.train()
        assert duel.model.none.weight.shape == (0, 8)
        duel.model.zero_grad(set_to_none=False)
        assert all(not param.grad.to_local().any() for param in duel.model.parameters() if param.grad is not None)


def last_empty_ends_the_list(params: Any) -> torch.optim.Optimizer:
    """A stand-in for fused kernels that mishandle empty tensors: used as users have to, without those."""
    kept = [param for param in params if (param.to_local() if hasattr(param, "to_local") else param).numel()]
    return torch.optim.AdamW(kept, lr=1e-2, fused=True)
