"""Cases: parameters at rest are DTensors that gather, save and load as what they are."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatron_fsdp_v2 import full_tensor, fully_shard
from megatron_fsdp_v2.sharding.dtensor import RowShard
from tests.functional.core.cases_support import STRATEGIES, ZERO_3, Ranks, case

# Uneven rows, one row, fewer rows than ranks, 1-D, 3-D, no rows, no columns.
SHAPES = ((7, 3), (5,), (1, 4), (2, 3, 2), (13, 5), (0, 3), (4, 0), (9, 2), (3,))
TWO_AXES = ("no_shard", "optim")


class Bag(nn.Module):
    """Parameters of many shapes, filled with distinct integers; its loss gives every element another gradient."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...] = SHAPES, start: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        for shape in shapes:
            numel = torch.Size(shape).numel()
            self.weights.append(nn.Parameter(torch.arange(start, start + numel, dtype=torch.float32).view(shape)))
            start += numel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(weight * (weight + index)).sum() * x for index, weight in enumerate(self.weights)]).sum()


@cache
def square_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))


def sharded_bag(layout: str, **options: Any) -> Bag:
    """A bag sharded by ``strategy`` over all ranks, or by ``strategy/outer_strategy`` over 2 x 2."""
    bag = Bag(**options)
    strategy, _, outer = layout.partition("/")
    if outer:
        return fully_shard(bag, mesh=square_mesh(), strategy=strategy, outer_strategy=outer)
    return fully_shard(bag, strategy=strategy)


TWO_AXIS_LAYOUTS = [f"{s}/{o}" for s in STRATEGIES for o in TWO_AXES if (s, o) != ("no_shard", "optim")]


def for_every_layout(fn: Callable[[Ranks, str], None]) -> tuple[Any, Any]:
    """``fn`` as a case for every strategy on one axis, and as another for every pair on 2 x 2."""

    def one_axis(ranks: Ranks, layout: str) -> None:
        fn(ranks, layout)

    def two_axes(ranks: Ranks, layout: str) -> None:
        fn(ranks, layout)

    for wrapper in (one_axis, two_axes):
        wrapper.__module__ = fn.__module__
    return (
        case(worlds=(1, 2, 3, 4), strategies=STRATEGIES)(one_axis),
        case(worlds=(4,), strategies=TWO_AXIS_LAYOUTS)(two_axes),
    )


@contextmanager
def shared_folder(ranks: Ranks) -> Iterator[Path]:
    """One new folder for all ranks, removed afterwards."""
    with tempfile.TemporaryDirectory() as own:
        box = [own]
        dist.broadcast_object_list(box, src=0)
        yield Path(box[0])
        dist.barrier()


def equal(ours: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert ours.shape == expected.shape, f"{what}: {tuple(ours.shape)} beside {tuple(expected.shape)}"
    assert torch.equal(ours, expected), what


def _gathers(ranks: Ranks, layout: str) -> None:
    bag, plain = sharded_bag(layout), Bag()
    for (name, ours), expected in zip(bag.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert ours.shape == expected.shape
        equal(full_tensor(ours), expected.detach(), f"full_tensor({name})")
        equal(ours.detach().full_tensor(), expected.detach(), f"{name}.full_tensor()")


gathers, gathers_on_two_axes = for_every_layout(_gathers)


def _offset(ranks: Ranks, layout: str) -> None:
    """torch's own arithmetic finds the rows that the rank holds; all ranks together hold every row."""
    bag, plain = sharded_bag(layout), Bag()
    for ours, expected in zip(bag.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        shape, offset = compute_local_shape_and_global_offset(ours.shape, ours.device_mesh, ours.placements)
        local = ours.to_local()
        assert tuple(local.shape) == tuple(shape)
        if local.numel():
            equal(local.detach(), expected.detach()[offset[0] : offset[0] + shape[0]], "rows at the offset")
            assert not any(offset[1:])
        held = torch.zeros(expected.shape[0])
        held[offset[0] : offset[0] + local.shape[0]] = 1
        dist.all_reduce(held)
        copies = ranks.world if layout.startswith("no_shard") else 2 if layout.endswith("/no_shard") else 1
        if expected.numel():
            assert held.tolist() == [copies] * expected.shape[0]


offset, offset_on_two_axes = for_every_layout(_offset)


def _optimizer_state(ranks: Ranks, layout: str) -> None:
    """Moments are DTensors like their parameter: same mesh, placement, shape and rows."""
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        bag = sharded_bag(layout)
        optimizer = torch.optim.AdamW(bag.parameters(), lr=0.1, **options)
        bag(torch.ones(())).backward()
        optimizer.step()
        for param in bag.parameters():
            assert isinstance(param, DTensor)
            assert isinstance(param.grad, DTensor)
            for moment in (optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"], param.grad):
                assert isinstance(moment, DTensor)
                assert moment.device_mesh == param.device_mesh
                assert moment.placements == param.placements
                assert all(type(a) is type(b) for a, b in zip(moment.placements, param.placements, strict=True))
                assert moment.shape == param.shape
                assert moment.to_local().shape == param.to_local().shape
            equal(full_tensor(optimizer.state[param]["exp_avg"]), 0.1 * full_tensor(param.grad), "first moment")


optimizer_state, optimizer_state_on_two_axes = for_every_layout(_optimizer_state)


def _after_arithmetic(ranks: Ranks, layout: str) -> None:
    """Results of operations that lose the placement are gathered rightly all the same."""
    bag, plain = sharded_bag(layout), Bag()
    for ours, expected in zip(bag.parameters(), plain.parameters(), strict=True):
        ours, expected = ours.detach(), expected.detach()
        equal(full_tensor(ours + ours), expected + expected, "sum")
        equal(full_tensor(ours * 3), expected * 3, "product")
        equal(full_tensor(ours.clone()), expected, "clone")
        equal(full_tensor(torch.zeros_like(ours)), torch.zeros_like(expected), "zeros_like")
        equal(full_tensor(ours.to(torch.bfloat16)), expected.to(torch.bfloat16), "cast")


after_arithmetic, after_arithmetic_on_two_axes = for_every_layout(_after_arithmetic)


def _round_trip(ranks: Ranks, layout: str) -> None:
    """Plain distributed checkpoints of weights and AdamW state, read back into another model and in one piece."""
    bag, optimizer = _trained_bag(layout)
    expected = {name: full_tensor(value).clone() for name, value in _state(bag, optimizer).items()}
    with shared_folder(ranks) as folder:
        dcp.save(_state(bag, optimizer), checkpoint_id=folder)
        other, fresh = _trained_bag(layout, start=1000)
        loaded = _state(other, fresh)
        dcp.load(loaded, checkpoint_id=folder)
        whole = {name: torch.empty_like(value) for name, value in expected.items()}
        dcp.load(whole, checkpoint_id=folder)
    for name, value in expected.items():
        equal(full_tensor(loaded[name]), value, f"{name} read into shards")
        equal(whole[name], value, f"{name} read whole")
    assert other(torch.ones(())).item() == bag(torch.ones(())).item()


def _trained_bag(layout: str, start: int = 0) -> tuple[Bag, torch.optim.Optimizer]:
    """A bag and its optimizer after one step."""
    bag = sharded_bag(layout, start=start)
    optimizer = torch.optim.AdamW(bag.parameters(), lr=0.1)
    bag(torch.ones(())).backward()
    optimizer.step()
    return bag, optimizer


def _state(bag: Bag, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = dict(bag.state_dict())
    for name, param in bag.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{name}.{key}"] = optimizer.state[param][key]
    return state


round_trip, round_trip_on_two_axes = for_every_layout(_round_trip)


@case(worlds=(2, 3, 4), strategies=(ZERO_3,))
def saved_chunks_tile_every_tensor_once(ranks: Ranks, strategy: str) -> None:
    bag = sharded_bag(strategy)
    with shared_folder(ranks) as folder:
        dcp.save(dict(bag.state_dict()), checkpoint_id=folder)
        metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, param in bag.named_parameters():
        rows: list[int] = []
        for chunk in metadata[name].chunks:
            rows += range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
        if param.numel():
            assert sorted(rows) == list(range(param.shape[0])), name


@case(worlds=(4,))
def loads_with_other_numbers_of_ranks(ranks: Ranks) -> None:
    """Saved over two axes, read over one, and the other way round; also by two of the ranks alone."""
    expected = [param.detach() for param in Bag().parameters()]
    pair = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("copy", "pair"))["pair"]
    makers: dict[str, Callable[[int], Bag]] = {
        "four": lambda start: fully_shard(Bag(start=start)),
        "two": lambda start: fully_shard(Bag(start=start), mesh=pair),
        "square": lambda start: sharded_bag(f"{ZERO_3}/optim", start=start),
    }
    for saved, save in makers.items():
        with shared_folder(ranks) as folder:
            dcp.save(dict(save(0).state_dict()), checkpoint_id=folder)
            for loaded, load in makers.items():
                target = load(500)
                dcp.load(dict(target.state_dict()), checkpoint_id=folder)
                for param, value in zip(target.parameters(), expected, strict=True):
                    equal(full_tensor(param), value, f"saved by {saved}, read by {loaded}")


@case(worlds=(2, 3), strategies=(ZERO_3,))
def placements_survive_pickling_and_copying(ranks: Ranks, strategy: str) -> None:
    bag = sharded_bag(strategy)
    for param in bag.parameters():
        (placement,) = param.placements
        assert isinstance(placement, RowShard)
        for other in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement)):
            assert type(other) is RowShard
            assert other == placement
            assert hash(other) == hash(placement)


@case(worlds=(2, 3), strategies=(ZERO_3, "no_shard"))
def parameters_gradients_and_state_dicts_can_be_copied_and_pickled(ranks: Ranks, strategy: str) -> None:
    bag = sharded_bag(strategy)
    bag(torch.ones(())).backward()
    weights = list(bag.parameters())
    gradients, state = [weight.grad for weight in weights], list(bag.state_dict().values())
    for whole in (weights, gradients, state):
        file = io.BytesIO()
        torch.save(whole, file)
        file.seek(0)
        # A parameter brings the attributes that users attached to it, of whatever class.
        for others in (copy.deepcopy(whole), torch.load(file, weights_only=whole is not weights)):
            for one, other in zip(whole, others, strict=True):
                assert isinstance(one, DTensor)
                assert isinstance(other, DTensor)
                assert other.placements == one.placements
                assert other.to_local().data_ptr() != one.to_local().data_ptr() or not one.to_local().numel()
                equal(full_tensor(other), full_tensor(one), "copy")


@case(worlds=(2, 3), strategies=(ZERO_3,))
def whole_and_partial_tensors_are_cut_as_the_placement_says(ranks: Ranks, strategy: str) -> None:
    """Redistributing to the placement of a parameter, and away from it, is exact."""
    for param in sharded_bag(strategy).parameters():
        assert isinstance(param, DTensor)
        whole = full_tensor(param)
        mesh = param.device_mesh
        cut = DTensor.from_local(whole, mesh, [Replicate()]).redistribute(placements=param.placements)
        equal(cut.to_local(), param.detach().to_local(), "cut from a replicated tensor")
        partial = DTensor.from_local(whole, mesh, [Partial()]).redistribute(placements=param.placements)
        equal(partial.to_local(), ranks.world * param.detach().to_local(), "reduced from a partial tensor")
        if param.ndim > 1:
            columns = param.detach().redistribute(placements=[Shard(1)])
            equal(columns.full_tensor(), whole, "cut along columns")


def _state_dict_helpers(ranks: Ranks, layout: str) -> None:
    """torch's own state dicts of model and optimizer: the whole ones are right, the sharded ones load."""
    bag, optimizer = _trained_bag(layout)
    whole = StateDictOptions(full_state_dict=True)
    model_state = get_model_state_dict(bag, options=whole)
    optimizer_state = get_optimizer_state_dict(bag, optimizer, options=whole)
    for name, param in bag.named_parameters():
        equal(model_state[name], full_tensor(param), name)
        moment = optimizer.state[param]["exp_avg"]
        equal(optimizer_state["state"][name]["exp_avg"], full_tensor(moment), f"moment of {name}")
    other, fresh = _trained_bag(layout, start=1000)
    set_model_state_dict(other, get_model_state_dict(bag))
    set_optimizer_state_dict(other, fresh, get_optimizer_state_dict(bag, optimizer))
    for (name, mine), theirs in zip(bag.named_parameters(), other.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        assert isinstance(theirs, DTensor)
        equal(theirs.detach().to_local(), mine.detach().to_local(), name)
        for key in ("exp_avg", "exp_avg_sq"):
            equal(fresh.state[theirs][key].to_local(), optimizer.state[mine][key].to_local(), f"{key} of {name}")
            assert fresh.state[theirs][key].placements == theirs.placements


state_dict_helpers, state_dict_helpers_on_two_axes = for_every_layout(_state_dict_helpers)


@case(worlds=(4,))
def whole_tensors_are_cut_by_two_axes(ranks: Ranks) -> None:
    for param in sharded_bag(f"{ZERO_3}/optim").parameters():
        assert isinstance(param, DTensor)
        whole = full_tensor(param)
        replicated = DTensor.from_local(whole, param.device_mesh, [Replicate(), Replicate()])
        cut = replicated.redistribute(placements=param.placements)
        equal(cut.to_local(), param.detach().to_local(), "cut from a replicated tensor")


@case(worlds=(2, 3))
def evenly_cut_tensors_of_the_same_shape_stay_apart(ranks: Ranks) -> None:
    """torch remembers what an operator gave for a spec; the answer for one cut must not be given for the other."""
    bag = sharded_bag(ZERO_3, shapes=tuple((rows, columns) for rows in range(4, 24) for columns in (1, 3)))
    for param in bag.parameters():
        assert isinstance(param, DTensor)
        mesh, (placement,) = param.device_mesh, param.placements
        even = DTensor.from_local(full_tensor(param), mesh, [Replicate()]).redistribute(placements=[Shard(0)])
        for _ in range(2):
            assert type(even.detach().placements[0]) is Shard
            assert type(param.detach().placements[0]) is RowShard
            assert type(torch.zeros_like(even).placements[0]) is Shard
            assert type(torch.zeros_like(param).placements[0]) is RowShard
        assert param._spec != even._spec
        assert even._spec != param._spec
        assert placement == Shard(0)


@case(worlds=(4,))
def placements_of_replicated_weights_are_replicated(ranks: Ranks) -> None:
    for param in sharded_bag("no_shard").parameters():
        assert param.placements == (Replicate(),)
    for param in sharded_bag(f"{ZERO_3}/no_shard").parameters():
        assert param.placements[0] == Replicate()
        assert isinstance(param.placements[1], RowShard)


@case(worlds=(2, 3))
def sums_the_elements_of_the_shards_to_the_whole(ranks: Ranks) -> None:
    """A moment created at the global size would not."""
    layer = fully_shard(nn.Linear(3, 5))
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    elements = torch.tensor([sum(state["exp_avg"].to_local().numel() for state in optimizer.state.values())])
    dist.all_reduce(elements)
    assert elements.item() == 20


@case(worlds=(2, 3, 4))
def refuses_to_gather_partial_tensors(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (ranks.world,))
    with pytest.raises(ValueError, match="mesh dimension 0"):
        full_tensor(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
