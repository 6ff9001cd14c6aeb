"""Cases: no gradient is ever dropped, whatever order forwards and backwards come in."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from megatron_fsdp_v2 import full_tensor, fully_shard
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
    sgd,
    shard_net,
    squared,
)


@case(strategies=STRATEGIES)
def two_backwards_without_a_marker(ranks: Ranks, strategy: str) -> None:
    Duel(ranks, Net(), shard_net(strategy)).train(micro_batches=2)


@case(strategies=STRATEGIES)
def two_backwards_through_one_graph(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))
    for _ in range(3):
        data = duel.data()
        loss, reference = duel.loss(squared, data), duel.reference_loss(squared, data)
        for retain in (True, False):
            loss.backward(retain_graph=retain)
            reference.backward(retain_graph=retain)
            assert_at_rest(duel.model)
        duel.step()
    duel.compare_weights()


class HalfUsed(nn.Module):
    """Of its two layers only the first gives gradients on even calls, both on odd ones."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.sometimes(x) if self.calls % 2 else y


class Chain(nn.Module):
    """Runs its layers one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


@case(strategies=STRATEGIES)
def parameters_of_a_unit_without_gradient(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Chain(Block(), HalfUsed(), Block()), shard_net(strategy), optimizer=sgd)
    for step in range(3):
        for model in (duel.model, duel.reference):
            model.layers[1].calls = step
        for _ in range(3):
            duel.backward()
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def two_forwards_then_two_backwards(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))
    for step in range(3):
        batches = [duel.data() for _ in range(3)]
        losses = [duel.loss(squared, data) for data in batches]
        references = [duel.reference_loss(squared, data) for data in batches]
        for index in range(3) if step % 2 else reversed(range(3)):
            losses[index].backward()
            references[index].backward()
            assert_at_rest(duel.model)
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def one_backward_over_two_forwards(ranks: Ranks, strategy: str) -> None:
    def both(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return squared(module, x) + module(2 * x).sum() * squared(module, x - 1)

    Duel(ranks, Net(), shard_net(strategy)).train(both)


@case(strategies=STRATEGIES)
def module_called_twice_in_sequence(ranks: Ranks, strategy: str) -> None:
    net = Net()
    net.order = [0, 1, 1, 2, 0]
    Duel(ranks, net, shard_net(strategy)).train()


class Branches(nn.Module):
    """f(x) + f(y) beside g(x), with inputs that do and don't need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        f, g, h = self.layers
        inner = h(x)
        return f(inner) + f(inner * 2) * g(inner) + f(x) + g(f(x))


@case(strategies=STRATEGIES)
def module_called_in_parallel_branches(ranks: Ranks, strategy: str) -> None:
    Duel(ranks, Branches(), shard_net(strategy)).train()


@case(strategies=STRATEGIES)
def module_skipped_on_some_passes(ranks: Ranks, strategy: str) -> None:
    """A module without a gradient keeps what it had: of this step, of an earlier micro-batch, or none at all."""
    duel = Duel(ranks, Net(4), shard_net(strategy), optimizer=sgd)
    for orders in ([[0, 1, 2, 3], [0, 2, 3], [3, 1]], [[1, 0], [1, 2, 0], [0, 1]], [[0, 1, 2, 3]] * 3):
        for order in orders:
            duel.model.order = duel.reference.order = order
            duel.backward()
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def module_skipped_when_put_off_gradients_are_due(ranks: Ranks, strategy: str) -> None:
    """The micro-batch that reduces everything leaves out a module whose gradients wait since an earlier one."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    for marker in ("no_sync", "set_requires_gradient_sync", "no_sync"):
        for last in (False, False, True):
            duel.model.order = duel.reference.order = [0, 2] if last else [0, 1, 2]
            if marker == "set_requires_gradient_sync":
                duel.model.set_requires_gradient_sync(last)
                duel.backward()
            elif last:
                duel.backward()
            else:
                with duel.model.no_sync():
                    duel.backward()
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def everything_put_off_until_finish_grad_sync(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.model.set_requires_gradient_sync(False)
    for _ in range(3):
        for _ in range(3):
            duel.backward()
        assert all(param.grad is None for param in duel.model.parameters())
        duel.model.finish_grad_sync()
        duel.step()
    duel.compare_weights()


class LateSkip(nn.Module):
    """Uses the first block's output again at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first)) * first


@case(strategies=STRATEGIES)
def output_used_late(ranks: Ranks, strategy: str) -> None:
    Duel(ranks, LateSkip(), shard_net(strategy)).train()


class Returns(nn.Module):
    """Hands out a block's output to whoever asks, beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = self.layers[0](x)
        return inner, self.layers[1](inner)


@case(strategies=STRATEGIES)
def only_one_of_two_outputs_gets_a_gradient(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Returns(), shard_net(strategy), optimizer=sgd)
    for _ in range(3):
        duel.backward(lambda module, x: module(x)[0].square().mean())
        duel.backward(lambda module, x: module(x)[1].square().mean())
        duel.backward(lambda module, x: sum(y.square().mean() for y in module(x)))
        duel.step()
    duel.compare_weights()


class _LateWeightGradient(torch.autograd.Function):
    """Multiplies by a weight whose gradient is kept for later instead of being returned."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, later: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.later = weight, later
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.later.append((ctx.weight, x.t() @ grad))
        return grad @ weight.t(), None, None


class Late(nn.Module):
    """A layer whose weight gradient exists only after `finish`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.later: list[tuple[nn.Parameter, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _LateWeightGradient.apply(x, self.weight, self.later)

    def finish(self, *unused: Any) -> None:
        for weight, grad in self.later:
            weight.grad = grad if weight.grad is None else weight.grad + grad
        self.later.clear()


@case(strategies=STRATEGIES)
def weight_gradient_computed_after_the_backward(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Chain(Block(), Late(), Block()), shard_net(strategy))
    for _ in range(3):
        for _ in range(3):
            data = duel.data()
            duel.loss(squared, data).backward()
            duel.reference_loss(squared, data).backward()
            for model in (duel.model, duel.reference):
                model.layers[1].finish()
        duel.model.finish_grad_sync()
        assert_at_rest(duel.model)
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def weight_gradient_computed_late_in_the_same_backward(ranks: Ranks, strategy: str) -> None:
    """The first block's backward comes after that of the late layer, and completes it."""
    duel = Duel(ranks, Chain(Block(), Late(), Block()), shard_net(strategy))

    def loss(module: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        x.register_hook(module.layers[1].finish)
        return squared(module, x)

    duel.train(loss)


@case(worlds=(2, 3))
def gradients_are_exposed_by_each_backward(ranks: Ranks) -> None:
    """Without any marker the sum so far is complete on the sharded parameters after every backward."""
    duel = Duel(ranks, Net(), shard_net(ZERO_3))
    for _ in range(3):
        duel.backward()
        duel.compare_gradients()


@case(worlds=(2, 4))
def unit_of_one_row(ranks: Ranks) -> None:
    """More ranks than rows: ranks own nothing of a unit, or nothing at all."""
    for layers in ([nn.Linear(WIDTH, 1, bias=False)], [Block(), nn.Linear(WIDTH, 1)]):
        duel = Duel(ranks, Chain(*layers), shard_net(ZERO_3))
        owned = sum(param.to_local().numel() for param in duel.model.parameters())
        if len(layers) == 1:
            assert (owned == 0) == (ranks.rank > 0)
        duel.train()


@case()
def unit_without_parameters(ranks: Ranks) -> None:
    duel = Duel(ranks, Chain(Block(), nn.Tanh(), Block()), shard_net(ZERO_3))
    duel.train()
    assert all(full_tensor(param).isfinite().all() for param in duel.model.parameters())


@case()
def only_the_root_is_a_unit(ranks: Ranks) -> None:
    Duel(ranks, Net(), fully_shard).train()
