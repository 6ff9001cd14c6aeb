"""Cases: frozen parameters, and parameters of several dtypes in one unit."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import MixedPrecisionPolicy, full_tensor, fully_shard
from tests.functional.core.cases_hooks import Chain
from tests.functional.core.cases_support import (
    STRATEGIES,
    WIDTH,
    ZERO_3,
    Block,
    Duel,
    Net,
    Ranks,
    case,
    gathered,
    refused,
    shard_net,
    squared,
    units_of,
)


def freeze(*modules: nn.Module) -> None:
    for module in modules:
        module.requires_grad_(False)


def assert_frozen_stayed(duel: Duel, before: dict[str, torch.Tensor]) -> None:
    """Frozen weights are what they were, have no gradient and no memory for one."""
    for name, param in duel.model.named_parameters():
        if not param.requires_grad:
            assert param.grad is None
            torch.testing.assert_close(full_tensor(param), before[name], rtol=0, atol=0)
    for unit in units_of(duel.model):
        for group in unit.groups:
            assert (group.gradients is None) == (not group.trainable)


def train_frozen(ranks: Ranks, model: Any, strategy: str) -> None:
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    duel = Duel(ranks, model, shard_net(strategy))
    duel.train()
    assert_frozen_stayed(duel, before)


@case(strategies=STRATEGIES)
def r32_frozen_unit_between_trainable_ones(ranks: Ranks, strategy: str) -> None:
    net = Chain(Block(), Block(), Block())
    freeze(net.layers[1])
    train_frozen(ranks, net, strategy)


@case(strategies=STRATEGIES)
def r32_frozen_first_unit(ranks: Ranks, strategy: str) -> None:
    """Its input needs no gradient, so that no backward ever reaches it."""
    net = Chain(Block(), Block(), Block())
    freeze(net.layers[0])
    train_frozen(ranks, net, strategy)
    net = Chain(nn.Linear(WIDTH, WIDTH), Block(), Block())
    freeze(net.layers[0], net.layers[1])
    train_frozen(ranks, net, strategy)


@case(strategies=STRATEGIES)
def r32_frozen_and_trainable_in_one_unit(ranks: Ranks, strategy: str) -> None:
    net = Net()
    for layer in net.layers:
        freeze(layer.norm)
        layer.up.bias.requires_grad_(False)
    net.scale.requires_grad_(False)
    freeze(net.layers[2].down)
    train_frozen(ranks, net, strategy)


@case(strategies=STRATEGIES)
def r32_hooks_before_and_after_are_balanced(ranks: Ranks, strategy: str) -> None:
    """Every unit that a backward reaches enters and leaves its backward phase equally often."""
    net = Chain(Block(), Block(), Block())
    freeze(net.layers[1])
    duel = Duel(ranks, net, shard_net(strategy))
    moves: dict[str, list[str]] = {}
    for unit in units_of(duel.model):
        record_phases(unit, moves)
    duel.train()
    assert moves["layers.1"] == ["forward", "idle", "backward", "idle"] * 9
    assert all(seen.count("backward") * 2 == seen.count("idle") for seen in moves.values())


def record_phases(unit: Any, moves: dict[str, list[str]]) -> None:
    original = unit.move_to

    def move_to(phase: Any) -> None:
        moves.setdefault(unit.name, []).append(phase.value)
        original(phase)

    unit.move_to = move_to


@case(strategies=(ZERO_3, "no_shard"))
def everything_frozen_but_the_input(ranks: Ranks, strategy: str) -> None:
    """Gradients of an input alone: every unit is gathered for it and freed again."""
    net = Chain(Block(), Block())
    freeze(net)
    duel = Duel(ranks, net, shard_net(strategy), optimizer=lambda params: None)  # type: ignore[arg-type, return-value]
    x = torch.randn(3, WIDTH, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    squared(duel.model, x).backward()
    squared(duel.reference, y).backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert gathered(duel.model) == []
    loss = squared(duel.model, x.detach())
    assert not loss.requires_grad
    assert gathered(duel.model) == []


@case(strategies=(ZERO_3, "optim"))
def frozen_weights_are_gathered_until_the_unit_is_done(ranks: Ranks, strategy: str) -> None:
    """The last trainable gradient of a unit comes before its frozen weights are needed for the input's."""

    class Adapter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH)
            self.low = nn.Linear(WIDTH, 2, bias=False)
            self.high = nn.Linear(2, WIDTH, bias=False)
            freeze(self.base)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.high(self.low(self.base(x))) + x

    train_frozen(ranks, Chain(Block(), Adapter(), Adapter()), strategy)


class Mixed(nn.Module):
    """Parameters of five dtypes, two of them integers, one of them bool."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, False]), requires_grad=False)
        self.steps = nn.Parameter(torch.arange(3, dtype=torch.int16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.linear.weight.dtype is torch.bfloat16
        y = self.linear(x.to(torch.bfloat16)).float()
        weights = self.router(x.double()).float()
        return (self.norm(y) * weights)[:, self.order] * self.mask * self.steps[1] + x


@case(strategies=STRATEGIES)
def r40_mixed_dtypes_in_one_unit(ranks: Ranks, strategy: str) -> None:
    """Integer, bool, bf16, fp32 and fp64 parameters each keep their dtype and are gathered for use."""
    dtypes = {name: param.dtype for name, param in Chain(Mixed()).named_parameters()}
    duel = Duel(ranks, Chain(Mixed(), Mixed()), shard_net(strategy), tolerance=0.02)
    assert all(isinstance(param, DTensor) for param in duel.model.parameters())
    duel.train()
    for name, param in duel.model.layers[0].named_parameters(prefix="layers.0"):
        assert param.dtype is dtypes[name]
        if not param.dtype.is_floating_point:
            torch.testing.assert_close(full_tensor(param), dict(duel.reference.named_parameters())[name].detach())


@case(strategies=(ZERO_3, "optim"))
def units_of_one_unusual_dtype(ranks: Ranks, strategy: str) -> None:
    """Not every backend can send every dtype."""

    class Constant(nn.Module):
        def __init__(self, value: torch.Tensor) -> None:
            super().__init__()
            self.value = nn.Parameter(value, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.value.abs() if self.value.is_complex() else x * self.value

    values = [
        torch.rand(WIDTH) > 0.3,
        torch.arange(1, WIDTH + 1, dtype=torch.int16),
        torch.arange(WIDTH),
        torch.rand(WIDTH, dtype=torch.complex64),
    ]
    layers = [Block(), *[Constant(value) for value in values]]
    Duel(ranks, Chain(*layers), shard_net(strategy)).train()


@case(strategies=(ZERO_3, "optim"), worlds=(1, 2, 3))
def integers_are_left_alone_by_mixed_precision(ranks: Ranks, strategy: str) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, main_params_dtype=torch.float32, cast_forward_inputs=False
    )

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.order.dtype is torch.int64
            return x[:, self.order] * self.weight.float()

    duel = Duel(ranks, Chain(Table(), Table()), shard_net(strategy, mp_policy=policy), tolerance=0.02)
    duel.train()
    assert duel.model.layers[0].order.dtype is torch.int64
    assert duel.model.layers[0].weight.dtype is torch.float32


@case(strategies=(ZERO_3, "optim"))
def freezing_after_fully_shard(ranks: Ranks, strategy: str) -> None:
    """Groups were made by it: refused before the first forward, and later."""
    for steps in (0, 1):
        duel = Duel(ranks, Net(), shard_net(strategy))
        duel.train(steps=steps)
        freeze(duel.model.layers[1])
        with refused(RuntimeError, "norm.weight", "requires_grad"):
            duel.loss(squared, duel.data())
        duel.model.layers[1].requires_grad_(True)
        duel.train()


@case(worlds=(1, 2))
def ignored_parameters_stay_as_they_are(ranks: Ranks) -> None:
    net = Net()
    ignored = net.layers[1].up.weight

    def shard(module: Any) -> None:
        for layer in module.layers:
            fully_shard(layer, ignored_params={ignored})
        fully_shard(module, ignored_params=[ignored])

    duel = Duel(ranks, net, shard)
    assert net.layers[1].up.weight is ignored
    assert not isinstance(ignored, DTensor)
    data = duel.data()
    duel.loss(squared, data).backward()
    expected = squared(duel.reference, data[ranks.rank])
    expected.backward()
    torch.testing.assert_close(ignored.grad, duel.reference.layers[1].up.weight.grad)
