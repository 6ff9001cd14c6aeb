"""Cases: modules that save and load more than their own memory, or under other names."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn

from megatron_fsdp_v2 import full_tensor, fully_shard, load_checkpoint, save_checkpoint
from megatron_fsdp_v2.checkpoint.metadata import read_metadata
from tests.functional.core.cases_checkpoint import sharded_net, trained
from tests.functional.core.cases_dtensor import shared_folder
from tests.functional.core.cases_support import WIDTH, ZERO_3, Ranks, adamw, case, sgd
from tests.functional.core.checkpoint_runs import same


class Tied(nn.Module):
    """Two names of one weight, a buffer, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, 7, bias=False)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(3))
        self.note = "new"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embedding(x) + self.head(x)

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@case(worlds=(1, 2), strategies=(ZERO_3, "no_shard"))
def tied_weights_buffers_and_other_state(ranks: Ranks, strategy: str) -> None:
    model, other = fully_shard(Tied(), strategy=strategy), fully_shard(Tied(), strategy=strategy)
    optimizer = trained(model)
    model.calls.fill_(5)
    model.note = "saved"
    loaded = adamw(other.parameters())
    with shared_folder(ranks) as folder:
        save_checkpoint(model, optimizer, folder / "c")
        load_checkpoint(other, loaded, folder / "c")
    assert (other.calls == 5).all()
    assert other.note == "saved"
    assert other.head.weight is other.embedding.weight
    assert len(loaded.state) == 1
    same(other.head.weight, full_tensor(model.head.weight).detach(), "tied")


class Derived(nn.Linear):
    """Keeps the sum of what it loaded."""

    total: Any = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.total = full_tensor(self.weight).sum().item()


class Scaled(nn.Module):
    """Has twice its buffer in state dicts, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(3))
        self.register_state_dict_post_hook(lambda module, state, prefix, _: self._multiply(state, f"{prefix}scale", 2))
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: self._multiply(state, f"{prefix}scale", 0.5)
        )

    def _multiply(self, state: dict[str, Any], key: str, factor: float) -> None:
        state[key] = state[key] * factor


class Individual(nn.Module):
    """Modules that do more to load than to take values, and one that doesn't."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.derived, self.scaled = nn.Linear(WIDTH, 3), Derived(WIDTH, 3), Scaled()
        self.hooked = nn.Sequential(nn.Linear(WIDTH, 3))
        self.hooked.register_load_state_dict_post_hook(lambda module, _: self.seen.append(module[0].bias.clone()))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) + self.derived(x) * self.scaled.scale + self.hooked(x)


@case(worlds=(1, 2))
def modules_load_as_they_do_by_load_state_dict(ranks: Ranks) -> None:
    """Whatever they do to load is done once, as torch does it; what is plain is read in place."""
    torch.manual_seed(0)
    load_state_dict = nn.Module.load_state_dict
    model, other, reference = Individual(), Individual(), Individual()
    model.scaled.scale.fill_(1.5)
    reference.load_state_dict(model.state_dict())
    for module in (model, other):
        fully_shard(module)
    with shared_folder(ranks) as folder:
        save_checkpoint(model, None, folder / "c")
        with mock.patch.object(nn.Module, "load_state_dict", autospec=True, side_effect=load_state_dict) as handed:
            load_checkpoint(other, None, folder / "c")
    for (name, ours), expected in zip(other.named_parameters(), reference.parameters(), strict=True):
        same(ours, expected.detach(), name)
    assert torch.equal(other.scaled.scale, reference.scaled.scale)
    assert (other.scaled.scale == 1.5).all()
    assert other.derived.total == pytest.approx(reference.derived.total)
    assert len(other.seen) == len(reference.seen) == 1
    same(other.seen[0], reference.seen[0], "seen by a hook")
    (call,) = handed.call_args_list
    assert not [name for name in call.args[1] if name.startswith("plain")]


@case(worlds=(1, 2))
def names_dont_depend_on_wrappers(ranks: Ranks) -> None:
    """A compiled model saves what the model itself would."""
    net = sharded_net()
    optimizer = trained(net, sgd)
    with shared_folder(ranks) as folder:
        save_checkpoint(torch.compile(net), optimizer, folder / "c")
        assert "model.layers.0.up.weight" in read_metadata(folder / "c").state_dict_metadata
        load_checkpoint(torch.compile(net), optimizer, folder / "c")
        load_checkpoint(net, optimizer, folder / "c")
