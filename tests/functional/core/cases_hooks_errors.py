"""Cases: what can't be right raises, naming the unit, and training goes on afterwards."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from megatron_fsdp_v2 import full_tensor
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
    refused,
    shard_net,
    squared,
    units_of,
)


class Trap(RuntimeError):
    """Raised on purpose."""


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Trap("backward")


class Trapped(nn.Module):
    """A block that raises where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.trap = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        if self.trap == "forward":
            raise Trap("forward")
        return _RaiseInBackward.apply(x) if self.trap == "backward" else x


@contextmanager
def trapped(module: Any, place: str) -> Iterator[None]:
    """What runs inside has to raise at `place`."""
    module.layers[1].trap = place
    with refused(Trap, place):
        yield
    module.layers[1].trap = ""


@case(strategies=STRATEGIES)
def exception_in_forward(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Chain(Block(), Trapped(), Block()), shard_net(strategy))
    for _ in range(3):
        duel.backward()
        with trapped(duel.model, "forward"):
            duel.loss(squared, duel.data())
        assert_at_rest(duel.model)
        duel.backward()
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def exception_in_backward_then_either_zero_grad(ranks: Ranks, strategy: str) -> None:
    """What the failed backward left behind must not leak into the next step, however gradients are cleared."""
    duel = Duel(ranks, Chain(Block(), Trapped(), Block()), shard_net(strategy))
    for clear in (duel.model.zero_grad, duel.optimizer.zero_grad, duel.model.zero_grad):
        with trapped(duel.model, "backward"):
            duel.loss(squared, duel.data()).backward()
        clear()
        for _ in range(3):
            duel.backward()
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def exception_in_backward_then_another_backward(ranks: Ranks, strategy: str) -> None:
    """The next backward comes without a forward in between, and still ends as every backward does."""
    duel = Duel(ranks, Chain(Block(), Trapped(), Block()), shard_net(strategy))
    for _ in range(3):
        data = duel.data()
        good, reference = duel.loss(squared, data), duel.reference_loss(squared, data)
        with trapped(duel.model, "backward"):
            duel.loss(squared, duel.data()).backward()
        duel.optimizer.zero_grad()
        good.backward()
        reference.backward()
        assert_at_rest(duel.model)
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def weights_written_between_forward_and_backward(ranks: Ranks, strategy: str) -> None:
    """Also when other forwards came in between, with gradients or without, which saw the new weights."""

    def write(module: Any) -> None:
        with torch.no_grad():
            module.layers[1].up.weight.mul_(0.5)

    for between in ("nothing", "evaluation", "forward", "joint backward"):
        duel = Duel(ranks, Net(), shard_net(strategy))
        duel.backward()
        loss = duel.loss(squared, duel.data())
        for model in (duel.model, duel.reference):
            write(model)
        data = duel.data()
        if between == "evaluation":
            with torch.no_grad():
                duel.loss(squared, data)
        elif between == "forward":
            duel.loss(squared, data)
        elif between == "joint backward":
            loss = loss + duel.loss(squared, data)
        with refused(RuntimeError, "layers.1", "between its forward and its backward"):
            loss.backward()
        for model in (duel.model, duel.reference):
            model.zero_grad()
        duel.train(steps=1)


@case(strategies=(ZERO_3, "no_shard"))
def weights_written_by_optimizer_or_load_before_backward(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.backward()
    state = {name: value.clone() for name, value in duel.model.state_dict().items()}
    for write in (duel.optimizer.step, lambda: duel.model.load_state_dict(state), duel.model.mark_weights_updated):
        loss = duel.loss(squared, duel.data())
        write()
        with refused(RuntimeError, "unit ", "were written"):
            loss.backward()


class Sloping(nn.Module):
    """Differentiates through a child inside its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probe = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.layers[0](probe).sum(), probe)
        return self.layers[1](x * self.gain) * slope * self.gain


@case(strategies=STRATEGIES)
def backward_through_a_child_inside_a_forward(ranks: Ranks, strategy: str) -> None:
    """The parent's own weights stay in place while the child's backward begins and ends."""
    Duel(ranks, Sloping(), shard_net(strategy)).train()


class Remembering(nn.Module):
    """Runs the backward of its last call inside its present one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block()])
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            self.last.sum().backward()
        self.last = self.layers[0](x)
        return self.last


@case(strategies=(ZERO_3, "optim"))
def backward_through_a_unit_inside_its_own_forward(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Remembering(), shard_net(strategy))
    root = duel.model
    root(torch.randn(2, WIDTH))
    with refused(RuntimeError, "Remembering", "inside its own forward"):
        root(torch.randn(2, WIDTH))
    root.last = duel.reference.last = None
    duel.train(lambda module, x: (module.layers[0](x)).square().mean())


@case(strategies=(ZERO_3, "optim"))
def second_derivatives(ranks: Ranks, strategy: str) -> None:
    """A backward of a backward would read freed weights; first derivatives with respect to an input are fine."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.train(steps=1)
    x = torch.randn(2, WIDTH, requires_grad=True)
    with refused(RuntimeError, "Net", "create_graph"):
        torch.autograd.grad(duel.model(x).sum(), x, create_graph=True)
    (slope,) = torch.autograd.grad(duel.model(x).sum(), x)
    (expected,) = torch.autograd.grad(duel.reference(x).sum(), x)
    torch.testing.assert_close(slope, expected)
    assert_at_rest(duel.model)
    assert all(param.grad is None for param in duel.model.parameters())
    duel.train()


@case(strategies=(ZERO_3, "optim"))
def optimizer_built_while_weights_are_gathered(ranks: Ranks, strategy: str) -> None:
    """It would hold parameters that never get a gradient, and train nothing."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    loss = duel.loss(squared, duel.data())
    optimizer = torch.optim.SGD(duel.model.parameters(), lr=0.1)
    loss.backward()
    with refused(RuntimeError, "scale", "at rest"):
        optimizer.step()
    duel.optimizer.zero_grad()
    duel.train()


@case(strategies=(ZERO_3, "optim"))
def parameters_changed_behind_the_back(ranks: Ranks, strategy: str) -> None:
    """Replaced, converted, frozen: refused at the next forward, by name; undone, training goes on."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.train(steps=1)
    layer = duel.model.layers[1]
    kept = layer.up.weight
    layer.up.weight = nn.Parameter(torch.zeros_like(full_tensor(kept)))
    with refused(RuntimeError, "up.weight", "layers.1", "replaced or converted"):
        duel.loss(squared, duel.data())
    layer.up.weight = kept
    kept.requires_grad_(False)
    with refused(RuntimeError, "up.weight", "layers.1", "requires_grad"):
        duel.loss(squared, duel.data())
    kept.requires_grad_(True)
    duel.train()
    layer.up.half()
    with refused(RuntimeError, "up.", "layers.1", "replaced or converted"):
        duel.loss(squared, duel.data())


class Leaking(nn.Module):
    """Returns its own weight, whole, as a view, or as a clone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.kind = "whole"

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        shared = {"whole": lambda: self.weight, "view": lambda: self.weight.t()[1:], "clone": self.weight.clone}
        return x @ self.weight, {"weight": shared[self.kind]()}


class Using(nn.Module):
    """Uses the weight that its first layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Leaking()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, extra = self.layers[0](x)
        return y * extra["weight"].sum()


@case()
def weights_returned_by_the_unit_that_frees_them(ranks: Ranks) -> None:
    duel = Duel(ranks, Using(), shard_net(ZERO_3))
    for kind in ("whole", "view"):
        duel.model.layers[0].kind = kind
        for grad in (True, False):
            with torch.set_grad_enabled(grad), refused(RuntimeError, "layers.0", "returned its own weights", "clone"):
                duel.loss(squared, duel.data())
            assert_at_rest(duel.model)
    duel.model.layers[0].kind = duel.reference.layers[0].kind = "clone"
    duel.train(lambda module, x: squared(module, x))


@case(strategies=("optim_grads", "optim", "no_shard"))
def weights_returned_where_they_stay(ranks: Ranks, strategy: str) -> None:
    for kind in ("whole", "view", "clone"):
        model = Using()
        model.layers[0].kind = kind
        Duel(ranks, model, shard_net(strategy)).train(lambda module, x: squared(module, x))


@case()
def a_dropped_model_is_freed(ranks: Ranks) -> None:
    """Nothing outside of the module holds it or its buffers."""
    duel = Duel(ranks, Net(), shard_net(ZERO_3))
    duel.train(steps=1)
    units = [weakref.ref(unit) for unit in units_of(duel.model)]
    del duel
    gc.collect()
    assert [unit() for unit in units] == [None] * len(units)
    hooks = importlib.import_module("torch.optim.optimizer")
    for _ in range(3):
        # Hooks of models that are gone go with the first forward of another one.
        Duel(ranks, Net(), shard_net(ZERO_3)).train(steps=1)
        gc.collect()
        assert len(hooks._global_optimizer_pre_hooks) == 1
        assert len(hooks._global_optimizer_post_hooks) == 1
