"""Cases: torch's own state dicts of model and optimizer, through plain DCP and consolidated into whole tensors."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import fully_shard
from tests.functional.core.cases_dtensor import Bag, shared_folder
from tests.functional.core.cases_support import STRATEGIES, Ranks, case
from tests.functional.core.checkpoint_runs import OPTIMIZERS, one_row, reference, same, sharded, train


@case(worlds=(4,), strategies=STRATEGIES)
def resumed_by_plain_dcp_before_any_step(ranks: Ranks, strategy: str) -> None:
    """One row on four ranks, loaded into an optimizer without state: it goes on as if uninterrupted (R06, R18)."""
    for kind in ("adam", "adamw", "momentum"):
        torch.manual_seed(0)
        model = fully_shard(one_row(), strategy=strategy)
        optimizer = OPTIMIZERS[kind](model.parameters())
        train(model, optimizer, "one", range(2))
        torch.manual_seed(9)
        fresh = fully_shard(one_row(), strategy=strategy)
        loaded = OPTIMIZERS[kind](fresh.parameters())
        with shared_folder(ranks) as folder:
            dcp.save(_both(model, optimizer), checkpoint_id=folder)
            state = _both(fresh, loaded)
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(fresh, loaded, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        train(fresh, loaded, "one", range(2, 4))
        for ours, expected in zip(fresh.parameters(), reference("one", kind), strict=True):
            torch.testing.assert_close(ours.detach().full_tensor(), expected, rtol=1e-4, atol=1e-5)


def _both(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


@case(worlds=(2, 3, 4))
def copies_of_state_dicts(ranks: Ranks) -> None:
    """A deep copy has the same keys, cuts and values, and memory of its own (R06)."""
    model = sharded("one")
    optimizer = OPTIMIZERS["adam"](model.parameters())
    train(model, optimizer, "one", range(2))
    state = _both(model, optimizer)
    copied = copy.deepcopy(state)
    moments = state["optimizer"]["state"]["weight"]
    assert copied["optimizer"]["state"].keys() == {"weight"}
    for key in ("exp_avg", "exp_avg_sq"):
        mine, other = moments[key], copied["optimizer"]["state"]["weight"][key]
        assert isinstance(other, DTensor)
        assert (other.placements, other.shape) == (mine.placements, mine.shape) == (model.weight.placements, (1, 4))
        before = mine.full_tensor().clone()
        mine.to_local().zero_()
        same(other, before, key)


@case(worlds=(2, 4))
def whole_state_dicts_have_no_padding(ranks: Ranks) -> None:
    """Shapes that no number of ranks divides: elements and values are those of the unsharded model (R10)."""
    for shapes in (((7,), (10, 5)), ((5, 3), (7,))):
        bag, plain = fully_shard(Bag(shapes)), Bag(shapes)
        made, expected = (torch.optim.Adam(module.parameters(), lr=0.1) for module in (bag, plain))
        for module, optimizer in ((bag, made), (plain, expected)):
            module(torch.ones(())).backward()
            optimizer.step()
        whole = StateDictOptions(full_state_dict=True)
        weights = get_model_state_dict(bag, options=whole)
        states = get_optimizer_state_dict(bag, made, options=whole)["state"]
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        assert sum(value.numel() for value in weights.values()) == elements
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach())
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(states[name][key], expected.state[parameter][key])
