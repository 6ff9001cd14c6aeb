"""Cases: what save_checkpoint and load_checkpoint keep of a run."""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import MixedPrecisionPolicy, full_tensor, fully_shard, load_checkpoint, save_checkpoint
from megatron_fsdp_v2.checkpoint.agreement import build_alike
from megatron_fsdp_v2.checkpoint.fused import FusedLayout
from megatron_fsdp_v2.checkpoint.metadata import read_metadata
from megatron_fsdp_v2.checkpoint.state_dict import build_state_dict, offer_of
from megatron_fsdp_v2.checkpoint.subject import Subject
from tests.functional.core.cases_dtensor import shared_folder
from tests.functional.core.cases_support import (
    STRATEGIES,
    WIDTH,
    ZERO_3,
    Net,
    Ranks,
    adamw,
    case,
    refused,
    shard_net,
    squared,
)
from tests.functional.core.checkpoint_runs import Skipping, one_row, same

FUSED = {"fused": FusedLayout((("_w", 4), ("_v", 4)))}


def trained(model: nn.Module, optimizer: Any = adamw, width: int = WIDTH) -> torch.optim.Optimizer:
    """An optimizer of the model after one step."""
    made: torch.optim.Optimizer = optimizer(model.parameters())
    squared(model, torch.ones(2, width)).backward()
    made.step()
    made.zero_grad()
    return made


def wholes(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors, gathered."""
    return {name: full_tensor(value).detach().clone() for name, value in values.items()}


def sharded_net(strategy: str = ZERO_3, seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    net = Net()
    shard_net(strategy, **options)(net)
    return net


@case(strategies=STRATEGIES)
def loaded_weights_are_computed_with_at_once(ranks: Ranks, strategy: str) -> None:
    """In bf16 beside fp32 main weights, from another seed, also where weights are gathered already (R16)."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    net = sharded_net(strategy, mp_policy=policy)
    optimizer = trained(net)
    x = torch.randn(3, WIDTH)
    other = sharded_net(strategy, seed=7, mp_policy=policy)
    with torch.no_grad(), shared_folder(ranks) as folder:
        save_checkpoint(net, optimizer, folder / "c")
        other(x)
        load_checkpoint(other, None, folder / "c")
        assert torch.equal(other(x), net(x))
    for ours, theirs in zip(other.parameters(), net.parameters(), strict=True):
        same(ours, full_tensor(theirs).detach(), "main weight")


@case(strategies=(ZERO_3, "no_shard"), worlds=(1, 3))
def between_forward_and_backward(ranks: Ranks, strategy: str) -> None:
    """Saved while units show their full weights: the shards are saved, and the backward goes on."""
    net = sharded_net(strategy)
    optimizer = trained(net)
    expected = wholes(dict(net.named_parameters()))
    loss = squared(net, torch.ones(2, WIDTH))
    with shared_folder(ranks) as folder:
        save_checkpoint(net, optimizer, folder / "c")
        loss.backward()
        optimizer.step()
        load_checkpoint(net, optimizer, folder / "c")
    for name, parameter in net.named_parameters():
        same(parameter, expected[name], name)


@case(worlds=(1, 2, 3))
def preparing_needs_no_communication(ranks: Ranks) -> None:
    """With every collective of torch.distributed replaced, there is one: what ranks tell each other of their keys."""
    net = sharded_net()
    optimizer = trained(net)
    subject = Subject.of(net, optimizer, {})
    calls: list[str] = []
    names = [
        name
        for name in dir(dist.distributed_c10d)
        if name.startswith(("all_", "_all_", "broadcast", "gather", "scatter", "reduce", "barrier", "send", "recv"))
        and callable(getattr(dist.distributed_c10d, name))
    ]
    assert "all_gather_object" in names
    assert "all_gather_into_tensor" in names

    def forbid(name: str) -> Any:
        def collective(*args: Any, **kwargs: Any) -> None:
            raise AssertionError(f"{name} while preparing")

        return collective

    def tell_all(answers: list[Any], mine: Any, group: Any = None) -> None:
        calls.append("all_gather_object")
        answers[:] = [mine] * len(answers)

    replaced = {name: forbid(name) for name in names}
    with (
        mock.patch.multiple(dist.distributed_c10d, **replaced),
        mock.patch.multiple(dist, **{name: value for name, value in replaced.items() if hasattr(dist, name)}),
    ):
        state_dict = build_state_dict(subject, {})
        with mock.patch.object(dist, "all_gather_object", tell_all):
            built = build_alike(lambda: state_dict, offer_of(subject))
    assert built is state_dict
    assert calls == ["all_gather_object"] * (ranks.world > 1)


@case(worlds=(2, 4), strategies=(ZERO_3, "optim", "no_shard"))
def moments_stay_like_their_parameters(ranks: Ranks, strategy: str) -> None:
    """Before and after a load they are DTensors with the parameter's cut, and can be copied and stored (R06, R07)."""
    layer = fully_shard(nn.Linear(3, 5), strategy=strategy)
    optimizer = trained(layer, width=3)
    fresh = fully_shard(nn.Linear(3, 5), strategy=strategy)
    loaded = adamw(fresh.parameters())
    with shared_folder(ranks) as folder:
        save_checkpoint(layer, optimizer, folder / "c")
        load_checkpoint(fresh, loaded, folder / "c")
    for model, made in ((layer, optimizer), (fresh, loaded)):
        for state_dict in (copy.deepcopy(made.state_dict()), _stored(made.state_dict()), made.state_dict()):
            elements = 0
            for parameter, state in zip(model.parameters(), state_dict["state"].values(), strict=True):
                for key in ("exp_avg", "exp_avg_sq"):
                    moment = state[key]
                    assert isinstance(moment, DTensor)
                    assert (moment.placements, moment.shape) == (parameter.placements, parameter.shape)
                    assert moment.device_mesh == parameter.device_mesh
                    assert moment.to_local().shape == parameter.to_local().shape
                    elements += moment.to_local().numel()
                    expected = optimizer.state[dict(layer.named_parameters())[_name(model, parameter)]][key]
                    assert torch.equal(moment.to_local(), expected.to_local())
            total = torch.tensor([elements])
            dist.all_reduce(total)
            assert total.item() == 2 * 20 * (ranks.world if strategy == "no_shard" else 1)
        assert wholes(_stored(model.state_dict())).keys() == dict(model.named_parameters()).keys()


def _stored(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _name(model: nn.Module, parameter: torch.Tensor) -> str:
    return next(name for name, other in model.named_parameters() if other is parameter)


@case(worlds=(4,))
def a_rank_without_any_state(ranks: Ranks) -> None:
    """Three of four ranks hold nothing and their optimizers keep nothing; what the fourth has is saved (R01, R06)."""
    model = fully_shard(one_row())
    optimizer = trained(model, lambda params: Skipping(params, lr=0.1), width=4)
    states = torch.tensor([len(optimizer.state)])
    dist.all_reduce(states)
    assert states.item() == 1
    with shared_folder(ranks) as folder:
        save_checkpoint(model, optimizer, folder / "c")
        assert "optimizer.state.weight.exp_avg" in read_metadata(folder / "c").state_dict_metadata
        load_checkpoint(model, optimizer, folder / "c")


class Gated(nn.Module):
    """A weight that holds two matrices, beside one that doesn't."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(8, WIDTH))
        self.plain = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = (x @ self.fused.t()).chunk(2, -1)
        return (gate.sigmoid() * value) @ self.plain


@case(worlds=(1, 3, 4))
def fused_parameters_are_saved_by_their_matrices(ranks: Ranks) -> None:
    """From shards into shards and into a plain module, with their moments, with keys of their own."""
    model = fully_shard(Gated())
    optimizer = trained(model)
    with shared_folder(ranks) as folder:
        save_checkpoint(model, optimizer, folder / "c", fused=FUSED)
        keys = read_metadata(folder / "c").state_dict_metadata
        for key in ("model.fused_w", "optimizer.state.fused_v.exp_avg", "optimizer.state.fused.step"):
            assert key in keys, key
        for other in (fully_shard(Gated()), Gated()):
            loaded = adamw(other.parameters())
            load_checkpoint(other, loaded, folder / "c", fused=FUSED)
            for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
                same(ours, full_tensor(theirs).detach(), "weight")
                for key, value in optimizer.state[theirs].items():
                    same(loaded.state[ours][key], full_tensor(value), key)


@case(worlds=(1, 2))
def options_are_found_by_the_names_of_parameters(ranks: Ranks) -> None:
    """Groups in another order get their own, also of several optimizers; groups that were different can't be one."""

    def groups(net: Net, *names: str) -> list[nn.Parameter]:
        return [parameter for name, parameter in net.named_parameters() if name.startswith(names)]

    net, other = sharded_net(), sharded_net(seed=1)
    first = torch.optim.AdamW(
        [{"params": groups(net, "head"), "lr": 0.5}, {"params": groups(net, "layers.0")}], lr=0.25
    )
    second = torch.optim.SGD(groups(net, "scale", "layers.1", "layers.2"), lr=0.125, momentum=0.5)
    squared(net, torch.ones(2, WIDTH)).backward()
    first.step()
    second.step()
    with shared_folder(ranks) as folder:
        save_checkpoint(net, [first, second], folder / "c")
        moved = torch.optim.SGD(groups(other, "layers.1", "layers.2", "scale"), lr=1)
        turned = torch.optim.AdamW([{"params": groups(other, "layers.0")}, {"params": groups(other, "head")}], lr=1)
        load_checkpoint(other, (moved, turned), folder / "c")
        assert [group["lr"] for group in turned.param_groups] == [0.25, 0.5]
        assert (moved.param_groups[0]["lr"], moved.param_groups[0]["momentum"]) == (0.125, 0.5)
        for name, parameter in net.named_parameters():
            expected = (first if parameter in first.state else second).state[parameter]
            mine = dict(other.named_parameters())[name]
            found = (turned if mine in turned.state else moved).state[mine]
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                same(found[key], full_tensor(value), f"{key} of {name}")
        joined = torch.optim.AdamW(groups(other, "layers.0", "head"), lr=1)
        with refused(Exception, "layers.0.norm.weight", "head.weight", "different options", "lr"):
            load_checkpoint(other, [joined, moved], folder / "c")
        assert joined.param_groups[0]["lr"] == 1
        assert not joined.state


@case(worlds=(2,))
def states_of_frozen_parameters_are_kept(ranks: Ranks) -> None:
    net = sharded_net()
    optimizer = trained(net)
    other = sharded_net(seed=1)
    for model in (net, other):
        for parameter in model.head.parameters():
            parameter.requires_grad_(False)
    loaded = adamw(other.parameters())
    with shared_folder(ranks) as folder:
        save_checkpoint(net, optimizer, folder / "c")
        load_checkpoint(other, loaded, folder / "c")
    assert not other.head.weight.requires_grad
    same(loaded.state[other.head.weight]["exp_avg"], full_tensor(optimizer.state[net.head.weight]["exp_avg"]), "frozen")


@case(worlds=(1, 3))
def extra_state(ranks: Ranks) -> None:
    """Numbers, texts, containers, schedulers, a sharded model: back where they were, tensors in place where given."""
    net, average = sharded_net(), sharded_net(seed=3)
    optimizer = trained(net)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 9])
    extra = {
        "step": 7,
        "text": "seven",
        "scheduler": scheduler,
        "nested": {"average": average, "list": [1, {2: (3.5, None)}], "tensors": [torch.ones(2)], "empty": {}},
    }
    expected = wholes(average.state_dict())
    other, fresh = sharded_net(seed=4), sharded_net(seed=5)
    new = torch.optim.lr_scheduler.MultiStepLR(adamw(other.parameters()), [4])
    kept = torch.zeros(2)
    with shared_folder(ranks) as folder:
        save_checkpoint(net, optimizer, folder / "c", extra={**extra, "place": torch.full((2,), 9.0)})
        given = {"scheduler": new, "nested": {"average": fresh}, "place": kept}
        loaded = load_checkpoint(other, None, folder / "c", extra=given)
        bare = load_checkpoint(other, None, folder / "c")
    assert (loaded["step"], loaded["text"]) == (7, "seven")
    assert loaded["nested"]["list"] == [1, {2: (3.5, None)}]
    assert loaded["nested"]["empty"] == {}
    assert torch.equal(loaded["nested"]["tensors"][0], torch.ones(2))
    assert new.milestones == scheduler.milestones
    assert loaded["place"].data_ptr() == kept.data_ptr()
    assert (kept == 9).all()
    for name, value in fresh.named_parameters():
        same(value, expected[name], name)
        assert torch.equal(bare["nested"]["average"][name], expected[name])


@case(worlds=(2,))
def part_of_the_ranks(ranks: Ranks) -> None:
    """A group of its own for each rank, each with its own model and folder."""
    groups = [dist.new_group([rank]) for rank in range(ranks.world)]
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, ranks.rank)
    with shared_folder(ranks) as folder:
        path = folder / str(ranks.rank)
        save_checkpoint(model, None, path, process_group=groups[ranks.rank])
        nn.init.constant_(model.weight, -1)
        load_checkpoint(model, None, path, process_group=groups[ranks.rank])
    assert (model.weight == ranks.rank).all()
