"""Cases: activation recomputation, re-entrant or not, around units, inside them, and around several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from tests.functional.core.cases_support import (
    STRATEGIES,
    WIDTH,
    ZERO_3,
    Block,
    Duel,
    Ranks,
    case,
    gathered,
    refused,
    sgd,
    shard_net,
    squared,
    units_of,
)

Checkpoint = Callable[..., Any]
REENTRANT = partial(checkpoint, use_reentrant=True)
PLAIN = partial(checkpoint, use_reentrant=False)


class Recomputed(nn.Module):
    """Blocks run by a function that may checkpoint them; the root's own parameters come first and last."""

    def __init__(self, run: Callable[[Any, torch.Tensor], torch.Tensor], blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, WIDTH))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x * self.gain) * self.gain


def around_each(how: Checkpoint, net: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = how(layer, x)
    return x


def around_every_other(how: Checkpoint, net: Any, x: torch.Tensor) -> torch.Tensor:
    for index, layer in enumerate(net.layers):
        x = how(layer, x) if index % 2 else layer(x)
    return x


def around_pairs(how: Checkpoint, net: Any, x: torch.Tensor) -> torch.Tensor:
    for first in range(0, len(net.layers), 2):
        pair = net.layers[first : first + 2]
        x = how(lambda y, pair=pair: pair[1](pair[0](y)), x)
    return x


def around_all(how: Checkpoint, net: Any, x: torch.Tensor) -> torch.Tensor:
    def body(y: torch.Tensor) -> torch.Tensor:
        for layer in net.layers:
            y = layer(y)
        return y

    return how(body, x)


def same_unit_twice(how: Checkpoint, net: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = net.layers[0], net.layers[1]
    return how(second, how(first, first(x))) + how(second, x)


class PartlyRecomputed(Block):
    """Recomputes a part of itself."""

    def __init__(self, how: Checkpoint) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.how(lambda y: torch.tanh(self.up(self.norm(y))), x)
        return x + self.down(inner)


def layer_by_layer(net: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in net.layers:
        x = layer(x)
    return x


def train(ranks: Ranks, strategy: str, run: Callable[[Any, torch.Tensor], torch.Tensor], **options: Any) -> Duel:
    """Train with recomputation beside a reference that recomputes the same."""
    duel = Duel(ranks, Recomputed(run), shard_net(strategy, **options))
    duel.train(steps=2)
    return duel


@case(strategies=STRATEGIES)
def reentrant_around_units(ranks: Ranks, strategy: str) -> None:
    train(ranks, strategy, partial(around_each, REENTRANT))
    train(ranks, strategy, partial(around_every_other, REENTRANT))


@case(strategies=STRATEGIES)
def around_units(ranks: Ranks, strategy: str) -> None:
    train(ranks, strategy, partial(around_each, PLAIN))
    train(ranks, strategy, partial(around_every_other, PLAIN))


@case(strategies=STRATEGIES)
def around_several_units(ranks: Ranks, strategy: str) -> None:
    for how in (REENTRANT, PLAIN):
        train(ranks, strategy, partial(around_pairs, how))
        train(ranks, strategy, partial(around_all, how))


@case(strategies=STRATEGIES)
def inside_units(ranks: Ranks, strategy: str) -> None:
    for how in (REENTRANT, PLAIN):
        net = Recomputed(layer_by_layer)
        net.layers = nn.ModuleList([PartlyRecomputed(how) for _ in range(3)])
        Duel(ranks, net, shard_net(strategy)).train(steps=2)


@case(strategies=STRATEGIES)
def around_and_inside_units(ranks: Ranks, strategy: str) -> None:
    net = Recomputed(partial(around_each, PLAIN))
    net.layers = nn.ModuleList([PartlyRecomputed(PLAIN) for _ in range(3)])
    Duel(ranks, net, shard_net(strategy)).train(steps=2)


@case(strategies=STRATEGIES)
def unit_called_twice(ranks: Ranks, strategy: str) -> None:
    for how in (REENTRANT, PLAIN):
        train(ranks, strategy, partial(same_unit_twice, how))


@case(strategies=STRATEGIES)
def early_stop_on_and_off(ranks: Ranks, strategy: str) -> None:
    """With early stop a recomputed forward ends in an exception once all it has to save is saved."""
    for stop in (True, False):
        with set_checkpoint_early_stop(stop):
            train(ranks, strategy, partial(around_all, PLAIN))


@case(strategies=STRATEGIES)
def around_the_root(ranks: Ranks, strategy: str) -> None:
    for how in (REENTRANT, PLAIN):
        duel = Duel(ranks, Recomputed(layer_by_layer), shard_net(strategy))

        def loss(module: nn.Module, x: torch.Tensor, how: Checkpoint = how) -> torch.Tensor:
            return how(module, x.clone().requires_grad_()).square().mean()

        duel.train(loss)


@case(strategies=(ZERO_3, "optim"))
def several_backwards_and_skipped_units(ranks: Ranks, strategy: str) -> None:
    """Two recomputed forwards before their backwards, one of them without some of the units."""
    duel = Duel(ranks, Recomputed(partial(around_each, PLAIN)), shard_net(strategy), optimizer=sgd)
    short = partial(around_pairs, REENTRANT)

    def both(module: Any, x: torch.Tensor) -> torch.Tensor:
        full = squared(module, x)
        usual, module.run = module.run, lambda net, y: short(_First(net), y)
        part = squared(module, x)
        module.run = usual
        return full + part

    duel.train(both)


class _First:
    """A net cut down to its first two layers."""

    def __init__(self, net: Any) -> None:
        self.layers = net.layers[:2]


@case(strategies=(ZERO_3,))
def no_more_than_three_units_are_gathered(ranks: Ranks, strategy: str) -> None:
    """A checkpoint around many units doesn't gather them all to recompute them."""
    counts: list[int] = []

    def watch(root: Any) -> None:
        shard_net(strategy)(root)
        for layer in root.layers:
            layer.register_forward_pre_hook(lambda *unused: counts.append(len(gathered(root))))

    for how in (REENTRANT, PLAIN):
        counts.clear()
        Duel(ranks, Recomputed(partial(around_all, how), blocks=6), watch).train(steps=2)
        root_and_three = 4
        assert 2 <= max(counts) <= root_and_three, f"{max(counts)} units were gathered at once"


@case(strategies=(ZERO_3, "optim"))
def weights_written_before_the_recomputation(ranks: Ranks, strategy: str) -> None:
    for how in (REENTRANT, PLAIN):
        duel = train(ranks, strategy, partial(around_each, how))
        loss = duel.loss(squared, duel.data())
        with torch.no_grad():
            duel.model.layers[3].down.weight.add_(1.0)
        with refused(RuntimeError, "layers.3", "were written"):
            loss.backward()
        assert all(unit.context.root is units_of(duel.model)[0] for unit in units_of(duel.model))


@case()
def dropout_is_replayed(ranks: Ranks) -> None:
    """Recomputation restores the random state; hooks must not draw from it. One rank's data for all: same masks."""
    net = Recomputed(lambda module, x: around_each(PLAIN, module, torch.dropout(x, 0.3, True)))
    net.layers = nn.ModuleList([Dropping() for _ in range(3)])
    same = partial(torch.randn, 1, 4, WIDTH)
    duel = Duel(ranks, net, shard_net(ZERO_3), inputs=lambda: same().repeat(ranks.world, 1, 1))

    for step in range(3):
        for micro_batch in range(3):
            data = duel.data()
            torch.manual_seed(10 * step + micro_batch)
            duel.loss(squared, data).backward()
            torch.manual_seed(10 * step + micro_batch)
            duel.reference_loss(squared, data[:1]).backward()
        duel.step()
    duel.compare_weights()


class Dropping(Block):
    """A block with dropout inside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.dropout(torch.tanh(self.up(x)), 0.3, True)) + self.norm(x)


@case(strategies=STRATEGIES)
def checkpoint_sequential_over_units(ranks: Ranks, strategy: str) -> None:
    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint_sequential(list(net.layers), 2, x, use_reentrant=False)

    train(ranks, strategy, run)
