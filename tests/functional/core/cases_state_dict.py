"""Cases: the parameters and the state dict that others see."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import full_tensor
from tests.functional.core.cases_support import (
    STRATEGIES,
    WIDTH,
    ZERO_3,
    Duel,
    Net,
    Ranks,
    adamw,
    assert_at_rest,
    case,
    refused,
    shard_net,
    squared,
)


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert isinstance(value, DTensor), f"{name} isn't sharded in the state dict"
        torch.testing.assert_close(full_tensor(value), theirs[name], atol=1e-5, rtol=1e-5)


@case(strategies=STRATEGIES)
def state_dict_at_any_moment(ranks: Ranks, strategy: str) -> None:
    """Names, order and values of the unsharded model; also between forward and backward, which then still works."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    for _ in range(3):
        assert_same_state(duel.model.state_dict(), duel.reference.state_dict())
        data = duel.data()
        loss = duel.loss(squared, data)
        assert_same_state(duel.model.state_dict(), duel.reference.state_dict())
        loss.backward()
        duel.reference_loss(squared, data).backward()
        assert_same_state(duel.model.state_dict(), duel.reference.state_dict())
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def resuming_from_state_dicts(ranks: Ranks, strategy: str) -> None:
    """Model and optimizer state of one run, loaded into fresh ones, continue it exactly."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.train(steps=2)
    model_state = {name: value.clone() for name, value in duel.model.state_dict().items()}
    optimizer_state = copy.deepcopy(duel.optimizer.state_dict())
    duel.train(steps=1)
    fresh = Net()
    shard_net(strategy)(fresh)
    fresh.load_state_dict(model_state)
    optimizer = adamw(fresh.parameters())
    optimizer.load_state_dict(copy.deepcopy(optimizer_state))
    twin = Duel(ranks, Net(), shard_net(strategy))
    twin.model, twin.optimizer = fresh, optimizer
    twin.reference.load_state_dict({name: full_tensor(value) for name, value in model_state.items()})
    twin.reference_optimizer = adamw(twin.reference.parameters())
    twin.reference_optimizer.load_state_dict(_unsharded(copy.deepcopy(optimizer_state)))
    twin.train(steps=2)


def _unsharded(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _unsharded(value) for key, value in state.items()}
    return full_tensor(state) if isinstance(state, DTensor) else state


@case(strategies=(ZERO_3, "no_shard"))
def loading_into_a_running_model(ranks: Ranks, strategy: str) -> None:
    """Pending gradients stay what they are; a backward whose forward saw the old weights is refused."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    state = {name: value.clone() for name, value in duel.model.state_dict().items()}
    reference_state = copy.deepcopy(duel.reference.state_dict())
    duel.train(steps=1)
    duel.backward()
    loss = duel.loss(squared, duel.data())
    duel.model.load_state_dict(state)
    duel.reference.load_state_dict(reference_state)
    with refused(RuntimeError, "were written"):
        loss.backward()
    duel.compare_gradients()
    duel.train(steps=1)


@case(strategies=(ZERO_3, "no_shard"))
def strict_loading_names_what_is_wrong(ranks: Ranks, strategy: str) -> None:
    net = Net()
    shard_net(strategy)(net)
    state = net.state_dict()
    short = {name: value for name, value in state.items() if name != "layers.1.up.weight"}
    with refused(RuntimeError, "Missing key", "layers.1.up.weight"):
        net.load_state_dict(short)
    missing, unexpected = net.load_state_dict({**short, "other": torch.ones(1)}, strict=False)
    assert (missing, unexpected) == (["layers.1.up.weight"], ["other"])
    whole = {name: full_tensor(value) for name, value in state.items()}
    with refused(RuntimeError, "layers.0.norm.weight"):
        net.load_state_dict(whole)
    assert_at_rest(net)
    net(torch.randn(2, WIDTH)).sum().backward()


@case(strategies=STRATEGIES)
def parameters_at_rest(ranks: Ranks, strategy: str) -> None:
    """DTensors of the original names and shapes, the same objects for good, with what users attached."""
    net = Net()
    net.layers[0].up.weight.tag = "mine"  # type: ignore[attr-defined]
    expected = {name: (param.shape, param.detach().clone()) for name, param in net.named_parameters()}
    shard_net(strategy)(net)
    before = dict(net.named_parameters())
    assert list(before) == list(expected)
    for name, param in before.items():
        assert isinstance(param, DTensor)
        assert param.shape == expected[name][0]
        assert param.is_leaf
        assert param.requires_grad
        torch.testing.assert_close(full_tensor(param), expected[name][1], rtol=0, atol=0)
    net(torch.randn(2, WIDTH)).sum().backward()
    assert all(param is before[name] for name, param in net.named_parameters())
    assert net.layers[0].up.weight.tag == "mine"
    net.layers[0].unshard()
    assert net.layers[0].up.weight.tag == "mine"
    assert not isinstance(net.layers[0].up.weight, DTensor)
    net.layers[0].reshard()
    assert net.layers[0].up.weight is before["layers.0.up.weight"]


@case(strategies=(ZERO_3, "no_shard"), worlds=(1, 2))
def parameters_can_be_copied_and_saved(ranks: Ranks, strategy: str) -> None:
    """Marks that sharding leaves on a parameter don't get in the way."""
    net = Net()
    shard_net(strategy)(net)
    param = net.layers[0].up.weight
    torch.testing.assert_close(copy.deepcopy(param).to_local(), param.to_local())
    file = io.BytesIO()
    torch.save(net.state_dict(keep_vars=True), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded["layers.0.up.weight"].to_local(), param.to_local())
