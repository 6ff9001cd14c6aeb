"""Cases: a stale copy of the weights is never computed with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from megatron_fsdp_v2 import MixedPrecisionPolicy, full_tensor
from tests.functional.core.cases_support import (
    STRATEGIES,
    WIDTH,
    ZERO_3,
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

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_params_dtype=torch.float32, cast_forward_inputs=False)
FP32 = MixedPrecisionPolicy()


class Sums(nn.Module):
    """Returns the sums of its own weights, so that what it computed with can be read off."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3))
        self.bias = nn.Parameter(torch.randn(1))

    def forward(self, skip: bool) -> torch.Tensor:
        assert not skip
        return torch.stack([self.weight.float().sum(), self.bias.float().sum()])


class Readers(nn.Module):
    """Units that can be left out, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sums() for _ in range(3)])
        self.own = nn.Parameter(torch.randn(4))
        self.skipped: set[int] = set()

    def forward(self) -> torch.Tensor:
        parts = [layer(False) for index, layer in enumerate(self.layers) if index not in self.skipped]
        return torch.cat([*parts, self.own.float().sum()[None]])


def assert_reads_main_weights(net: Any, read: Callable[[], torch.Tensor]) -> None:
    """A forward computes with the main weights of this moment, cast to the dtype it computes in."""
    dtype = units_of(net)[0].groups[0].precision.compute

    def total(param: torch.Tensor) -> torch.Tensor:
        return full_tensor(param).to(dtype).float().sum()

    layers = [layer for index, layer in enumerate(net.layers) if index not in net.skipped]
    expected = torch.stack([total(p) for layer in layers for p in (layer.weight, layer.bias)] + [total(net.own)])
    torch.testing.assert_close(read().detach(), expected)


def readers(strategy: str, policy: MixedPrecisionPolicy) -> Any:
    net = Readers()
    shard_net(strategy, mp_policy=policy)(net)
    return net


def write(net: Any, factor: float = 1.5) -> None:
    """Write the parameters at rest: after a forward the root goes on to show its gathered weights."""
    net.reshard()
    with torch.no_grad():
        for param in net.parameters():
            param.mul_(factor)


@case(strategies=STRATEGIES)
def after_writes_in_place(ranks: Ranks, strategy: str) -> None:
    for policy in (FP32, BF16):
        net = readers(strategy, policy)
        assert_reads_main_weights(net, net)
        write(net)
        assert_reads_main_weights(net, net)
        net.reshard()
        with torch.no_grad():
            net.layers[1].weight.copy_(torch.zeros_like(net.layers[1].weight))
            net.layers[2].bias.to_local().fill_(3.0)
            net.own.detach().add_(1.0)
        assert_reads_main_weights(net, net)
        net.layers[0].weight.to_local().data.fill_(7.0)
        net.layers[0].mark_weights_updated()
        assert_reads_main_weights(net, net)


@case(strategies=STRATEGIES)
def after_optimizer_steps(ranks: Ranks, strategy: str) -> None:
    adam = torch.optim.Adam
    makers = [
        partial(adam, lr=0.1, foreach=True),
        partial(adam, lr=0.1, fused=True),
        partial(adam, lr=0.1, foreach=False),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(RawSGD, defaults={"lr": 0.1}),
    ]
    for policy in (FP32, BF16):
        for make in makers:
            net = readers(strategy, policy)
            optimizer = make(net.parameters())
            for _ in range(2):
                before = full_tensor(net.layers[0].weight).clone()
                net().sum().backward()
                optimizer.step()
                assert_reads_main_weights(net, net)
                assert not full_tensor(net.layers[0].weight).equal(before)
                net.zero_grad()


class RawSGD(torch.optim.Optimizer):
    """Writes through a pointer that torch's version counters don't see, as custom kernels do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.to_local().data.sub_(param.grad.to_local(), alpha=group["lr"])


@case(strategies=STRATEGIES)
def r16_after_load_state_dict(ranks: Ranks, strategy: str) -> None:
    """The forward right after a load gives the saved model's loss."""
    for policy in (FP32, BF16):
        policy = replace(policy, cast_forward_inputs=True)
        torch.manual_seed(1)
        saved = Net()
        shard_net(strategy, mp_policy=policy)(saved)
        state = {name: value.clone() for name, value in saved.state_dict().items()}
        x = torch.randn(4, WIDTH)
        with torch.no_grad():
            expected = squared(saved, x)
        torch.manual_seed(2)
        fresh = Net()
        shard_net(strategy, mp_policy=policy)(fresh)
        with torch.no_grad():
            assert not squared(fresh, x).equal(expected)
            fresh.load_state_dict(state)
            assert squared(fresh, x).equal(expected)
        squared(fresh, x).backward()
        for unit in units_of(fresh):
            for group in unit.groups:
                main = torch.cat([piece.flatten() for piece in group.main.pieces])
                compute = torch.cat([piece.flatten() for piece in group._own_compute.pieces])
                assert compute.equal(main.to(compute.dtype)), "compute weights aren't the cast main weights"


@case(strategies=STRATEGIES)
def skipped_modules(ranks: Ranks, strategy: str) -> None:
    """A module that was left out while its weights changed, once or more often."""
    for policy in (FP32, BF16):
        net = readers(strategy, policy)
        for skipped in ({1}, {1, 2}, set(), {0}, {0, 1}, {2}, set()):
            net.skipped = skipped
            assert_reads_main_weights(net, net)
            write(net)


@case(strategies=STRATEGIES)
def evaluation_passes(ranks: Ranks, strategy: str) -> None:
    """Under no_grad and inference mode, between steps and as the very first forward."""
    for policy in (FP32, BF16):
        for mode in (torch.no_grad, torch.inference_mode):
            net = readers(strategy, policy)
            for _ in range(3):
                with mode():
                    seen = net()
                assert_at_rest(net)
                assert_reads_main_weights(net, lambda seen=seen: seen)
                net().sum().backward()
                with mode():
                    seen = net()
                assert_reads_main_weights(net, lambda seen=seen: seen)
                write(net)


@case(strategies=STRATEGIES)
def training_that_began_under_inference_mode(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))
    with torch.inference_mode():
        duel.model(torch.randn(2, WIDTH))
    duel.train()


@case(strategies=STRATEGIES)
def children_alone(ranks: Ranks, strategy: str) -> None:
    for policy in (FP32, BF16):
        net = readers(strategy, policy)
        net()
        for _ in range(2):
            write(net)
            assert_reads_main_weights(net, lambda net=net: _layer_by_layer(net))
        assert_reads_main_weights(net, net)


def _layer_by_layer(net: Any) -> torch.Tensor:
    own = units_of(net)[0]
    net.unshard()
    root = net.own.float().sum()[None]
    net.reshard()
    assert not own.is_bound
    return torch.cat([*[layer(False) for layer in net.layers], root])


@case(strategies=STRATEGIES)
def weights_gathered_by_hand_or_ahead(ranks: Ranks, strategy: str) -> None:
    """What was gathered before a write isn't used after it."""
    for policy in (FP32, BF16):
        net = readers(strategy, policy)
        net()
        net.layers[1].unshard()
        net.start_weight_gather()
        write_main(net)
        assert_reads_main_weights_bound(net)
        net.start_weight_gather()
        assert_reads_main_weights_bound(net)


def assert_reads_main_weights_bound(net: Any) -> None:
    seen = net()
    seen.sum().backward()
    assert_at_rest(net)
    assert_reads_main_weights(net, lambda: seen)


def write_main(net: Any) -> None:
    """Write what the units show at rest, whatever they show now."""
    with torch.no_grad():
        for unit in units_of(net):
            for group in unit.groups:
                for param in group.sharded_params:
                    param.mul_(0.5)


@case(strategies=STRATEGIES)
def gathered_weights_written(ranks: Ranks, strategy: str) -> None:
    """Such a write would be lost or not, depending on the strategy: it is refused with all of them."""
    net = readers(strategy, FP32)
    loss = net().sum()
    with torch.no_grad():
        net.own.mul_(2.0)
    with refused(RuntimeError, "Readers", "were written"):
        loss.backward()
    net = readers(strategy, FP32)
    net()
    net.layers[1].unshard()
    with torch.no_grad():
        net.layers[1].weight.mul_(2.0)
    net.layers[1].reshard()
    with refused(RuntimeError, "layers.1", "gathered weights", "were written"):
        net()
    assert_reads_main_weights_bound(net)


@case(strategies=STRATEGIES)
def several_micro_batches_share_one_refresh(ranks: Ranks, strategy: str) -> None:
    """Replicated weights are brought up to date once per step, not per micro-batch."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.train(steps=1)
    gathers = {ZERO_3: 3 * 7, "optim_grads": 4, "optim": 4, "no_shard": 0}
    with counted_gathers(units_of(duel.model)) as issued:
        duel.train(steps=2)
    assert len(issued) == 2 * gathers[strategy], f"{len(issued)} gathers"


class counted_gathers:
    """Lists the groups whose gather is issued while it is entered."""

    def __init__(self, units: list[Any]) -> None:
        self._groups = [group for unit in units for group in unit.groups]
        self._issued: list[Any] = []

    def __enter__(self) -> list[Any]:
        for group in self._groups:
            group.start_gather = partial(self._start, group, group.start_gather)
        return self._issued

    def _start(self, group: Any, start: Callable[[int], Any], version: int) -> Any:
        transfer = start(version)
        self._issued += [] if transfer is None else [group]
        return transfer

    def __exit__(self, *unused: Any) -> None:
        for group in self._groups:
            del group.start_gather


@case(strategies=(ZERO_3, "optim"), worlds=(1, 2))
def loading_by_assignment(ranks: Ranks, strategy: str) -> None:
    """Refused: the loaded tensors would never be computed with. Loading by copying goes on to work."""
    net = readers(strategy, FP32)
    state = {name: torch.ones_like(value) for name, value in net.state_dict().items()}
    with refused(ValueError, "assign=True", "assign=False"):
        net.load_state_dict(state, assign=True)
    net.load_state_dict(state)
    assert_reads_main_weights(net, net)
