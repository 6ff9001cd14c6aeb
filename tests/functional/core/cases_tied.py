"""Cases: parameters that several modules hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from megatron_fsdp_v2 import fully_shard
from tests.functional.core.cases_hooks import Chain
from tests.functional.core.cases_support import (
    STRATEGIES,
    ZERO_3,
    Block,
    Duel,
    Ranks,
    case,
    refused,
    units_of,
)

VOCABULARY = 7
WIDE = 3


class Tied(nn.Module):
    """R34: an embedding whose weight is the output head's too, with blocks in between."""

    def __init__(self, meta: bool = False) -> None:
        super().__init__()
        with torch.device("meta" if meta else "cpu"):
            self.embedding = nn.Embedding(VOCABULARY, WIDE)
            self.layers = nn.ModuleList([Block(WIDE), Block(WIDE)])
            self.head = nn.Linear(WIDE, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight
        self.embedding.weight.tag = "kept"  # type: ignore[attr-defined]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(ranks: Ranks) -> Any:
    return lambda: torch.randint(VOCABULARY, (ranks.world, 6))


def next_token(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(module(x[:-1]), x[1:])


def shard_blocks_and_root(strategy: str) -> Any:
    def shard(net: Any) -> None:
        for layer in net.layers:
            fully_shard(layer, strategy=strategy)
        fully_shard(net, strategy=strategy)

    return shard


def assert_tied(duel: Duel) -> None:
    net = duel.model
    assert net.head.weight is net.embedding.weight
    assert net.head.weight.tag == "kept"
    assert [name for name, _ in net.named_parameters() if "weight" in name and "layers" not in name] == [
        "embedding.weight"
    ]


@case(strategies=STRATEGIES)
def r34a_tied_within_a_unit(ranks: Ranks, strategy: str) -> None:
    """One optimizer entry, the gradient of both uses, and one parameter after steps and loads."""
    duel = Duel(ranks, Tied(), shard_blocks_and_root(strategy), inputs=tokens(ranks))
    assert_tied(duel)
    entries = [param for options in duel.optimizer.param_groups for param in options["params"]]
    assert len(entries) == len(list(duel.reference.parameters()))
    duel.train(next_token, steps=2)
    assert_tied(duel)
    state = {name: value.clone() for name, value in duel.model.state_dict().items()}
    assert {"embedding.weight", "head.weight"} <= state.keys()
    duel.train(next_token, steps=1)
    duel.model.load_state_dict(state)
    assert_tied(duel)
    context = units_of(duel.model)[0].context
    assert len({id(param) for group in context.all_groups() for param in group.sharded_params}) == len(entries)


@case(strategies=STRATEGIES)
def r34b_tied_across_units(ranks: Ranks, strategy: str) -> None:
    """Refused, naming both paths, and before anything is changed: one unit for both then works."""
    net = Tied()
    for layer in net.layers:
        fully_shard(layer, strategy=strategy)
    fully_shard(net.embedding, strategy=strategy)
    with refused(ValueError, "Tied.head.weight", "Tied.embedding.weight", "let one unit own both"):
        fully_shard(net, strategy=strategy)
    with refused(ValueError, "Linear.weight", "Embedding.weight", "let one unit own both"):
        fully_shard(net.head, strategy=strategy)
    assert not hasattr(net, "_fsdp_unit")


@case(worlds=(1, 2))
def r34b_tied_across_units_on_meta(ranks: Ranks) -> None:
    """Materializing one of two units must not hide the tie from the other."""
    net = Tied(meta=True)
    fully_shard(net.embedding)
    with refused(ValueError, "Linear.weight", "Embedding.weight"):
        fully_shard(net.head)
    with refused(ValueError, "Tied.head.weight", "Tied.embedding.weight"):
        fully_shard(net)


@case(strategies=STRATEGIES)
def r34c_tied_and_built_on_meta(ranks: Ranks, strategy: str) -> None:
    net = Tied(meta=True)
    torch.manual_seed(3)
    shard_blocks_and_root(strategy)(net)
    assert_tied(type("Net", (), {"model": net})())  # type: ignore[arg-type]
    duel = Duel(ranks, Tied(), shard_blocks_and_root(strategy), inputs=tokens(ranks))
    net.load_state_dict(duel.model.state_dict())
    duel.model = net
    duel.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    assert_tied(duel)
    duel.train(next_token, steps=2)
    assert_tied(duel)


class SharedBlock(nn.Module):
    """Holds a block that its sibling holds too."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.own = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.block(x))


@case(strategies=STRATEGIES)
def module_at_two_places_of_a_unit(ranks: Ranks, strategy: str) -> None:
    block = Block()
    Duel(ranks, Chain(SharedBlock(block), SharedBlock(block)), lambda net: fully_shard(net, strategy=strategy)).train()


@case(strategies=STRATEGIES)
def unit_at_two_places(ranks: Ranks, strategy: str) -> None:
    """A shared module that is a unit of its own serves both."""

    def shard(net: Any) -> None:
        fully_shard(net.layers[0].block, strategy=strategy)
        for layer in net.layers:
            fully_shard(layer, strategy=strategy)
        fully_shard(net, strategy=strategy)

    block = Block()
    duel = Duel(ranks, Chain(SharedBlock(block), SharedBlock(block)), shard)
    assert len(units_of(duel.model)) == 4
    duel.train()


@case(strategies=(ZERO_3, "no_shard"))
def module_shared_by_two_units(ranks: Ranks, strategy: str) -> None:
    block = Block()
    net = Chain(SharedBlock(block), SharedBlock(block))
    fully_shard(net.layers[0], strategy=strategy)
    with refused(ValueError, "SharedBlock.block.norm.weight", "sharded already", "SharedBlock.block.norm.weight"):
        fully_shard(net.layers[1], strategy=strategy)
    assert not hasattr(net.layers[1], "_fsdp_unit")


@case(strategies=STRATEGIES)
def tied_inside_one_module(ranks: Ranks, strategy: str) -> None:
    """Two names of one module for one parameter."""

    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(5))
            self.second = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.first + self.second.sin()

    def shard(net: Any) -> None:
        for layer in net.layers:
            fully_shard(layer, strategy=strategy)
        fully_shard(net, strategy=strategy)

    duel = Duel(ranks, Chain(Alias(), Alias()), shard)
    duel.train()
    assert duel.model.layers[0].first is duel.model.layers[0].second
