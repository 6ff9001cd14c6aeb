"""Cases: tensors that leave a forward beside its result, and hooks that users put on sharded parameters."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn as nn

from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard
from tests.functional.core.cases_support import (
    STRATEGIES,
    ZERO_3,
    Block,
    Duel,
    Net,
    Ranks,
    case,
    refused,
    sgd,
    shard_net,
    squared,
)


class Aside(Block):
    """Leaves losses that read its weights in an attribute, a list of its own and a list or dict it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        y = super().forward(x)
        self.alone = self.up(x).square().mean()
        self.kept = [self.down(self.up(x) + 1).square().mean()]
        third = (self.norm(x) + 1).square().mean()
        if isinstance(given, dict):
            given[f"loss{len(given)}"] = third
        else:
            given.append(third)
        return y


class Asides(nn.Module):
    """Layers with losses on the side; `where` says which of them count, `result` whether the output counts too."""

    def __init__(self, where: str, result: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Aside() for _ in range(3)])
        self.head = nn.Linear(5, 3)
        self.where, self.result = where, result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: Any = {} if self.where == "dict" else []
        for layer in self.layers:
            x = layer(x, given)
        self.side = self.head(x + 1).square().mean()
        losses = {
            "attribute": [layer.alone for layer in self.layers],
            "list of its own": [layer.kept[0] for layer in self.layers],
            "list": given,
            "dict": list(given.values()) if isinstance(given, dict) else [],
            "last": [self.layers[-1].alone],
            "root": [self.side],
        }
        self.total = sum(losses[self.where])
        return self.head(x)


@case(strategies=STRATEGIES)
def losses_beside_the_result(ranks: Ranks, strategy: str) -> None:
    """Their backward reads weights too; it may come before that of the result, or alone."""

    def loss(module: Any, x: torch.Tensor) -> torch.Tensor:
        result = module(x)
        return module.total + result.square().mean() if module.result else module.total

    for where in ("attribute", "list of its own", "list", "dict", "last", "root"):
        for result in (True, False):
            Duel(ranks, Asides(where, result), shard_net(strategy), optimizer=sgd).train(loss, steps=2)


@case(worlds=(1, 2))
def tensors_kept_from_earlier_calls_are_watched_once(ranks: Ranks) -> None:
    duel = Duel(ranks, Asides("attribute", True), shard_net(ZERO_3))
    duel.loss(lambda module, x: module(x).sum(), duel.data())
    layer = duel.model.layers[0]
    kept = layer.alone
    with torch.no_grad():
        duel.loss(lambda module, x: module(x).sum(), duel.data())
    layer.alone = kept
    hooks = len(kept._backward_hooks or {})
    fresh = layer._fsdp_unit.side_outputs.collect()
    assert all(tensor is not kept for tensor in fresh)
    assert len(kept._backward_hooks or {}) == hooks


class Outside(Block):
    """Leaves its loss where nobody looks for one."""

    losses: ClassVar[list[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.append(super().forward(x).square().mean())
        return x


def outside(module: Any, x: torch.Tensor) -> torch.Tensor:
    module(x)
    return module.losses.pop()


@case(strategies=("optim_grads", "optim", "no_shard"))
def gradients_that_no_result_announced(ranks: Ranks, strategy: str) -> None:
    """Refused when an optimizer steps without them; right once they are reduced by hand."""
    duel = Duel(ranks, Outside(), lambda module: fully_shard(module, strategy=strategy), optimizer=sgd)
    for _ in range(3):
        data = duel.data()
        duel.loss(outside, data).backward()
        duel.reference_loss(outside, data).backward()
        with refused(RuntimeError, "unit 'Outside'", "finish_grad_sync()"):
            duel.optimizer.step()
        duel.model.finish_grad_sync()
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def hooks_after_accumulation(ranks: Ranks, strategy: str) -> None:
    """Called once per parameter and reduced backward, with the final gradient, and may step an optimizer there."""
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float64)
    duel = Duel(ranks, Net(), shard_net(strategy, mp_policy=policy), optimizer=sgd)
    reference = dict(duel.reference.named_parameters())
    called: list[str] = []
    rate = 0.05

    def step(name: str, param: Any) -> None:
        called.append(name)
        param.add_(param.grad, alpha=-rate)
        param.grad = None

    for name, param in duel.model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda param, name=name: step(name, param))
    for _ in range(3):
        data = [duel.data() for _ in range(2)]
        with duel.model.no_sync():
            duel.model.set_requires_gradient_sync(False)
            duel.loss(squared, data[0]).backward()
            duel.model.set_requires_gradient_sync(True)
        assert not called
        duel.loss(squared, data[1]).backward()
        assert sorted(called) == sorted(reference)
        called.clear()
        for micro_batch in data:
            duel.reference_loss(squared, micro_batch).backward()
        for param in reference.values():
            param.data.add_(param.grad, alpha=-rate)
            param.grad = None
        duel.compare_weights()


@case(worlds=(1, 2))
def hooks_that_autograd_never_calls_are_told_of(ranks: Ranks) -> None:
    duel = Duel(ranks, Net(), shard_net())
    duel.model.layers[1].up.weight.register_hook(lambda grad: grad)
    with pytest.warns(UserWarning, match="up.weight .*register_hook.*register_post_accumulate_grad_hook"):
        duel.train(steps=1)
