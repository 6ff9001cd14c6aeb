"""Cases: what a module may be given, return and do, and who may call it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from megatron_fsdp_v2 import fully_shard
from tests.functional.core.cases_hooks import Chain
from tests.functional.core.cases_support import (
    STRATEGIES,
    WIDTH,
    ZERO_3,
    Block,
    Duel,
    Net,
    Ranks,
    assert_at_rest,
    case,
    gathered,
    refused,
    sgd,
    shard_net,
    squared,
    units_of,
)


@dataclass
class Result:
    """A dataclass output."""

    hidden: torch.Tensor
    extra: dict[str, Any]


class Pair(NamedTuple):
    """A named tuple output."""

    hidden: torch.Tensor
    count: int


class Opaque:
    """An output that no tree library knows."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden
        self.label = "opaque"


class Returning(nn.Module):
    """Wraps its block's output, and unwraps what the one before it returned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Block()
        self.kind = kind

    def forward(self, value: Any) -> Any:
        y = self.block(hidden_of(value))
        wrapped = {
            "dict": {"hidden": y, "none": None, "text": "x"},
            "dataclass": Result(y, {"double": 2 * y, "count": 3}),
            "tuple": (None, y, 7, [y * 2]),
            "named tuple": Pair(y, 2),
            "object": Opaque(y),
        }
        return wrapped[self.kind]


def hidden_of(value: Any) -> torch.Tensor:
    """The tensor in any of the outputs above."""
    if isinstance(value, dict):
        return value["hidden"]
    if isinstance(value, tuple) and not hasattr(value, "hidden"):
        return value[1]
    return value if isinstance(value, torch.Tensor) else value.hidden


class Wrapping(nn.Module):
    """Units that hand each other values of every kind."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ("dict", "dataclass", "tuple", "named tuple", "object")
        self.layers = nn.ModuleList([Returning(kind) for kind in kinds])

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        value: Any = x
        for layer in self.layers:
            value = layer(value)
        return {"hidden": hidden_of(value)}


@case(strategies=STRATEGIES)
def outputs_and_inputs_of_any_kind(ranks: Ranks, strategy: str) -> None:
    def loss(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)["hidden"].square().mean()

    Duel(ranks, Wrapping(), shard_net(strategy)).train(loss)


class Keywords(nn.Module):
    """Takes its input by keyword, and writes into a list and a dict it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, *, x: torch.Tensor, losses: list[torch.Tensor], cache: dict[str, Any], scale: float = 1.0) -> Any:
        y = self.block(x) * scale
        losses.append(y.abs().mean())
        cache["calls"] = cache.get("calls", 0) + 1
        return y


class Collecting(nn.Module):
    """Adds what its layers appended to a list to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Keywords() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        cache: dict[str, Any] = {}
        for layer in self.layers:
            x = layer(x=x, losses=losses, cache=cache, scale=0.5)
        assert cache["calls"] == len(self.layers), "a module wrote into a copy of its argument"
        return x + torch.stack(losses).sum()


@case(strategies=STRATEGIES)
def keyword_inputs_and_containers_written_into(ranks: Ranks, strategy: str) -> None:
    # Each part of the batch has a loss of its own, since outputs depend on the means of what is in one.
    Duel(ranks, Collecting(), shard_net(strategy)).train(lambda module, x: squared(module, x))


class Bare(nn.Module):
    """A root that owns a parameter of its own beside a child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        self.child = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return self.child(x * self.scale) * self.scale + shift


@case(strategies=STRATEGIES)
def r30_root_owned_parameters_and_user_hooks(ranks: Ranks, strategy: str) -> None:
    """Parameters held by the root itself are gathered, and user hooks fire once per call, with their keywords."""
    for child_is_unit in (False, True):
        seen: list[tuple[str, dict[str, Any]]] = []

        def shard(root: Any, child_is_unit: bool = child_is_unit, seen: list[Any] = seen) -> None:
            if child_is_unit:
                fully_shard(root.child, strategy=strategy)
            fully_shard(root, strategy=strategy)
            root.register_forward_pre_hook(lambda m, args, kwargs: seen.append(("pre", kwargs)), with_kwargs=True)
            root.register_forward_hook(lambda m, args, kwargs, out: seen.append(("post", kwargs)), with_kwargs=True)

        duel = Duel(ranks, Bare(), shard)
        duel.train(lambda module, x: module(x, shift=0.25).square().mean())
        assert seen == [("pre", {"shift": 0.25}), ("post", {"shift": 0.25})] * 9


class Nested(nn.Module):
    """Four leaves below two parents below a root: with the head eight units, three deep."""

    def __init__(self) -> None:
        super().__init__()
        self.parents = nn.ModuleList([Parent(), Parent()])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parent in self.parents:
            x = parent(x)
        return self.head(x)


class Parent(nn.Module):
    """Uses a parameter of its own before, between and after its children."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.1))
        self.first = Block()
        self.second = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x * self.gain) * self.gain) * self.gain


@case(strategies=STRATEGIES)
def eight_units_three_deep(ranks: Ranks, strategy: str) -> None:
    def shard(root: Any) -> None:
        for parent in root.parents:
            for inner in (parent.first, parent.second, parent):
                fully_shard(inner, strategy=strategy)
        fully_shard(root.head, strategy=strategy)
        fully_shard(root, strategy=strategy)
        assert len(units_of(root)) == 8

    Duel(ranks, Nested(), shard).train()


class Modal(nn.Module):
    """Computes something else in evaluation mode, and keeps a running mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.layers[1](x)
        self.calls += 1
        return self.layers[1](self.norm(self.layers[0](x)))


@case(strategies=STRATEGIES, worlds=(1, 2, 3))
def switches_between_train_and_eval(ranks: Ranks, strategy: str) -> None:
    """All ranks see the same data here, since the reference normalises over the whole batch."""
    same = partial(torch.randn, 1, 4, WIDTH)
    # The bias before the norm has a gradient of rounding errors, which must not be scaled up.
    duel = Duel(ranks, Modal(), shard_net(strategy), optimizer=sgd, inputs=lambda: same().repeat(ranks.world, 1, 1))
    for _ in range(3):
        for model in (duel.model, duel.reference):
            model.eval()
        x = duel.data()[0]
        with torch.no_grad():
            torch.testing.assert_close(duel.model(x), duel.reference(x))
        duel.backward()
        for model in (duel.model, duel.reference):
            model.train()
        duel.backward()
        duel.step()
    duel.compare_weights()
    assert duel.model.calls == 3
    assert not duel.model.norm.training or duel.model.norm.running_mean.any()


@case(strategies=STRATEGIES)
def child_called_alone_after_the_root(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))
    for step in range(3):
        duel.backward()
        duel.backward(lambda module, x: module.layers[1](x).square().mean())
        with torch.no_grad():
            duel.model.layers[2](torch.randn(2, WIDTH))
        assert_at_rest(duel.model)
        if step:
            duel.backward(lambda module, x: (module.layers[0](x) * module.layers[1](x)).mean())
        duel.backward()
        duel.step()
    duel.compare_weights()


@case(strategies=(ZERO_3, "optim"))
def child_called_alone_before_the_root(ranks: Ranks, strategy: str) -> None:
    """Refused with the way out, which then works."""
    model = Net()
    shard_net(strategy)(model)
    model.layers[1](torch.randn(2, WIDTH)).sum().backward()
    with refused(RuntimeError, "layers.1", "lazy_init"):
        model(torch.randn(2, WIDTH))

    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.model.lazy_init()
    duel.backward(lambda module, x: module.layers[1](x).square().mean())
    duel.train()


@case(strategies=STRATEGIES)
def methods_before_the_first_forward_make_no_root(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))
    for layer in duel.model.layers:
        layer.zero_grad()
        layer.reshard()
        layer.scale_gradients(2.0)
        layer.mark_weights_updated()
        with layer.no_sync():
            pass
    duel.train()
    assert [unit.name for unit in units_of(duel.model)] == ["Net", "layers.0", "layers.1", "layers.2"]


@case()
def unshard_and_reshard_by_hand(ranks: Ranks) -> None:
    duel = Duel(ranks, Net(), shard_net(ZERO_3))
    duel.train(steps=1)
    layer, expected = duel.model.layers[1], duel.reference.layers[1]
    handle = layer.unshard(async_op=True)
    handle.wait()
    handle.wait()
    torch.testing.assert_close(layer.up.weight.detach(), expected.up.weight.detach())
    assert gathered(duel.model) == ["layers.1"]
    layer.reshard()
    layer.reshard()
    assert_at_rest(duel.model)
    layer.unshard()
    duel.train()


@case()
def weights_kept_between_forward_and_backward_or_after(ranks: Ranks) -> None:
    duel = Duel(ranks, Net(), shard_net(ZERO_3, reshard_after_forward=False))
    loss = duel.loss(squared, duel.data())
    assert len(gathered(duel.model)) == 4
    loss.backward()
    assert_at_rest(duel.model)
    duel.model.zero_grad()
    duel.model.set_reshard_after_forward(True)
    loss = duel.loss(squared, duel.data())
    assert gathered(duel.model) == []
    loss.backward()
    duel.model.zero_grad()
    duel.model.set_reshard_after_backward(False)
    duel.loss(squared, duel.data()).backward()
    assert len(gathered(duel.model)) == 4
    duel.model.zero_grad()
    duel.model.set_reshard_after_backward(True)
    duel.train()


@case(worlds=(1, 2, 3), strategies=(ZERO_3, "optim"))
def a_unit_that_calls_itself(ranks: Ranks, strategy: str) -> None:
    class Recursive(Block):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self(super().forward(x), depth - 1) if depth else x

    duel = Duel(ranks, Chain(Recursive(), Block()), shard_net(strategy))
    duel.train()
    assert_at_rest(duel.model)
