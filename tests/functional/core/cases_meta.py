"""Cases: modules built on the meta device get memory and real initial values while they are sharded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import full_tensor, fully_shard
from tests.functional.core.cases_support import (
    STRATEGIES,
    WIDTH,
    ZERO_3,
    Duel,
    Net,
    Ranks,
    adamw,
    case,
    refused,
    shard_net,
)


class Rotary(nn.Module):
    """A module with a buffer and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.frequencies.copy_(torch.linspace(0.1, 1.0, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.frequencies


class Scaled(nn.Module):
    """A parameter with attributes, a frozen one and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.weight.tag = {"parallel": False}  # type: ignore[attr-defined]
        self.gain = nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.order = nn.Parameter(torch.empty(WIDTH, dtype=torch.int64), requires_grad=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)
        nn.init.constant_(self.gain, 2.0)
        with torch.no_grad():
            self.order.copy_(torch.arange(WIDTH - 1, -1, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.rotary(x) @ self.weight * self.gain)[:, self.order]


def meta_net() -> Any:
    with torch.device("meta"):
        net = Net()
        net.layers[1] = Scaled()
    # `linspace` gave the bare parameter its value, which a meta device forgets; the root has no way to restore it.
    net.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
    return net


@case(strategies=STRATEGIES)
def built_on_meta_then_trained(ranks: Ranks, strategy: str) -> None:
    """Initial values are those of `reset_parameters`, whole on every rank before they are cut."""
    net = meta_net()
    torch.manual_seed(11)
    shard_net(strategy)(net)
    assert not any(tensor.is_meta for tensor in [*net.parameters(), *net.buffers()])
    assert all(isinstance(param, DTensor) for param in net.parameters())
    reference = Net()
    reference.layers[1] = Scaled()
    torch.manual_seed(11)
    with torch.no_grad():
        for layer in reference.layers:
            for module in layer.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
    for name, param in net.named_parameters():
        if name.startswith(("layers.0", "layers.1")):
            torch.testing.assert_close(full_tensor(param), dict(reference.named_parameters())[name].detach())
    with torch.no_grad():
        for name, param in reference.named_parameters():
            param.copy_(full_tensor(net.get_parameter(name)))
    duel = Duel(ranks, reference, lambda module: None)
    duel.model, duel.optimizer = net, adamw(net.parameters())
    duel.train()


@case(worlds=(1, 2))
def attributes_and_flags_are_kept(ranks: Ranks) -> None:
    net = meta_net()
    shard_net()(net)
    scaled = net.layers[1]
    for _ in range(2):
        assert scaled.weight.tag == {"parallel": False}
        assert not scaled.gain.requires_grad
        assert scaled.order.dtype is torch.int64
        assert full_tensor(scaled.order).tolist() == list(range(WIDTH - 1, -1, -1))
        torch.testing.assert_close(scaled.rotary.frequencies, torch.linspace(0.1, 1.0, WIDTH))
        net(torch.randn(2, WIDTH)).sum().backward()
    scaled.unshard()
    assert scaled.weight.tag == {"parallel": False}
    scaled.reshard()


@case(worlds=(1, 2))
def missing_reset_parameters(ranks: Ranks) -> None:
    """What has no value is named when it is sharded, refused when it is computed with, and taken once it has one."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("shift", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale + self.shift

    with torch.device("meta"):
        module = Plain()
    with pytest.warns(UserWarning, match="buffer shift, scale came on the meta device"):
        fully_shard(module)
    assert full_tensor(module.scale).isnan().all()
    assert full_tensor(module.linear.weight).abs().max() > 0
    with refused(RuntimeError, "buffer shift", "never got a value"):
        module(torch.randn(2, WIDTH))
    with torch.no_grad():
        module.scale.fill_(1)
    module.shift.zero_()
    assert module(torch.randn(2, WIDTH)).isfinite().all()


@case(worlds=(1, 2))
def real_values_beside_meta_ones_are_kept(ranks: Ranks) -> None:
    with torch.device("meta"):
        linear = nn.Linear(WIDTH, WIDTH)
    linear.bias = nn.Parameter(torch.full((WIDTH,), 7.0))
    fully_shard(linear)
    assert full_tensor(linear.bias).tolist() == [7.0] * WIDTH
    assert full_tensor(linear.weight).abs().max() > 0


@case(worlds=(1, 2))
def parameters_left_without_a_value(ranks: Ranks) -> None:
    """`reset_parameters` that forgets a parameter is found out, and the parameter is NaN rather than garbage."""

    class Forgetful(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    with torch.device("meta"):
        module = Forgetful(WIDTH, WIDTH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fully_shard(module)
    assert [str(w.message) for w in caught if "bias came on the meta device" in str(w.message)]
    assert full_tensor(module.bias).isnan().all()
    assert full_tensor(module.weight).eq(1).all()


@case(strategies=(ZERO_3, "optim"))
def loaded_right_after_it_was_built_on_meta(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.train(steps=1)
    with torch.device("meta"):
        fresh = Net()
    fresh.scale = nn.Parameter(torch.zeros(WIDTH))
    shard_net(strategy)(fresh)
    fresh.load_state_dict(duel.model.state_dict())
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(fresh(x), duel.reference(x))
