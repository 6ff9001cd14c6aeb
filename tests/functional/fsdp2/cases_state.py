"""Cases: weights that come from and go to elsewhere: state dicts, checkpoints, the meta device, other parallelisms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.counting import StepCounter
from megatron_fsdp_v2 import full_tensor, fully_shard
from tests.functional.core.cases_dtensor import shared_folder
from tests.functional.core.cases_support import WIDTH, Block, Net, Ranks, adamw, case, refused, squared
from tests.functional.fsdp2.trio import Trio, by_layers, whole


@case(usual=(2,))
def state_dicts_need_no_communication(ranks: Ranks) -> None:
    trio = Trio(ranks, Net())
    trio.train(steps=1)
    with StepCounter() as counter:
        ours, theirs = [model.state_dict() for model in trio.both]
        for model, state in zip(trio.both, (ours, theirs), strict=True):
            model.load_state_dict({name: value.clone() for name, value in state.items()})
    assert not counter.calls
    assert list(ours) == list(theirs)
    assert [value.shape for value in ours.values()] == [value.shape for value in theirs.values()]
    assert all(isinstance(value, DTensor) for value in ours.values())
    trio.train(steps=1)


@case(usual=(3,))
def whole_state_dicts(ranks: Ranks) -> None:
    """Gathered for rank 0 and sent out from there, as for a file without shards."""
    trio = Trio(ranks, Net())
    trio.train(steps=1)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    ours, theirs = [get_model_state_dict(model, options=options) for model in trio.both]
    assert list(ours) == list(theirs)
    assert bool(ours) == (ranks.rank == 0)
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-5)
    for wrap in (fully_shard, torch_fully_shard):
        fresh = Net()
        by_layers(wrap, fresh)
        set_model_state_dict(
            fresh, dict(ours), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        )
        for name, param in fresh.named_parameters():
            torch.testing.assert_close(full_tensor(param), full_tensor(trio.model.get_parameter(name)))


@case(usual=(2,))
def whole_tensors_cut_for_loading(ranks: Ranks) -> None:
    """A whole tensor that all ranks have is cut by `redistribute`. `distribute_tensor` cuts evenly: an error here."""
    trio = Trio(ranks, Net())
    state = {name: torch.randn(param.shape) for name, param in trio.reference.named_parameters()}
    for model in trio.both:
        params = dict(model.named_parameters())
        replicated = {name: distribute_tensor(state[name], param.device_mesh) for name, param in params.items()}
        model.load_state_dict(
            {name: replicated[name].redistribute(placements=param.placements) for name, param in params.items()}
        )
    trio.reference.load_state_dict(state)
    trio.compare_weights()
    params = dict(trio.model.named_parameters())
    evenly = {name: distribute_tensor(state[name], param.device_mesh, [Shard(0)]) for name, param in params.items()}
    torch.testing.assert_close(evenly["scale"].full_tensor(), state["scale"])
    trio.model.load_state_dict(
        {
            name: value.redistribute(placements=[Replicate()]).redistribute(placements=params[name].placements)
            for name, value in evenly.items()
        }
    )
    trio.train(steps=1)


@case(worlds=(2,))
def evenly_cut_tensors_are_no_shards_of_ours(ranks: Ranks) -> None:
    """Refused by name; above all where one row would be spread over those that the rank holds."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.zeros(2, 3))
            self.second = nn.Parameter(torch.zeros(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.first + self.second).t()

    model = Pair()
    fully_shard(model)
    rows = torch.arange(6.0).view(2, 3)
    for distribute in (lambda param: param.placements, lambda param: [Shard(0)]):
        state = {
            name: distribute_tensor(rows, param.device_mesh, distribute(param))  # type: ignore[attr-defined]
            for name, param in model.named_parameters()
        }
        with refused(ValueError, "first", "cut evenly", "Replicate()"):
            model.load_state_dict(state)
    assert not full_tensor(model.first).any()
    model.load_state_dict({name: param.detach() for name, param in model.named_parameters()})


class Titan(nn.Module):
    """Initialises its parameters and buffers by a method that is called after they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("frequencies", torch.empty(WIDTH), persistent=False)

    def init_weights(self) -> None:
        """Constants of rows and columns, so that they don't depend on who holds which rows."""
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.fill_(0.05 * (index % 7) - 0.1)
            self.frequencies.copy_(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale * self.frequencies


@case(usual=(2,))
def meta_then_to_empty(ranks: Ranks) -> None:
    """Built on meta, sharded, given memory, initialised, in this order."""
    reference = Titan()
    reference.init_weights()
    models = []
    for wrap in (fully_shard, torch_fully_shard):
        with torch.device("meta"):
            model = Titan()
        by_layers(wrap, model)
        model.to_empty(device="cpu")
        model.init_weights()
        models.append(model)
    trio = Trio(ranks, Titan(), lambda wrap, model: None)
    trio.model, trio.theirs, trio.reference = *models, reference
    trio.optimizer, trio.their_optimizer, trio.reference_optimizer = [
        adamw(model.parameters()) for model in (*models, reference)
    ]
    trio.train(steps=2)


class Mlp(nn.Module):
    """Two linear maps that tensor parallelism cuts by rows and by columns, below a norm it leaves whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


@case(worlds=(4,))
def tensor_parallelism_on_a_second_axis(ranks: Ranks) -> None:
    """A plan that cuts one weight by rows and one by columns: trained, clipped, saved and loaded on a 2-D mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def shard(wrap: Callable[..., Any], model: Any) -> None:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        wrap(model, mesh=mesh["dp"])

    trio = Trio(ranks, Mlp(), shard)
    for model in trio.both:
        for linear in (model.up, model.down):
            assert isinstance(linear.weight, DTensor)
            assert set(linear.weight.device_mesh.mesh_dim_names or ()) == {"dp", "tp"}
        assert model.down.weight.to_local().shape[1] == 6
    for _ in range(3):
        data = torch.randn(2, 5, 8)
        losses = [squared(model, data[mesh.get_local_rank("dp")]) for model in trio.both]
        for loss in [*losses, squared(trio.reference, data.flatten(0, 1))]:
            loss.backward()
        for optimizer in trio.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    _compare_with_reference(trio, trio.model)
    with shared_folder(ranks) as folder:
        dcp.save({"model": trio.model.state_dict()}, checkpoint_id=folder)
        plain = {name: torch.empty_like(param) for name, param in trio.reference.named_parameters()}
        dcp.load({"model": plain}, checkpoint_id=folder)
        theirs = {"model": trio.theirs.state_dict()}
        for value in theirs["model"].values():
            value.zero_()
        dcp.load(theirs, checkpoint_id=folder)
    for name, param in trio.reference.named_parameters():
        torch.testing.assert_close(plain[name], param.detach(), rtol=1e-4, atol=1e-5, msg=name)
    _compare_with_reference(trio, trio.theirs)


def _compare_with_reference(trio: Trio, model: nn.Module) -> None:
    gather = full_tensor if model is trio.model else whole
    for name, param in model.named_parameters():
        expected = trio.reference.get_parameter(name).detach()
        torch.testing.assert_close(gather(param).detach(), expected, rtol=1e-4, atol=1e-5, msg=name)


def saved(rank: int, world: int, folder: str, by: str) -> dict[str, torch.Tensor]:
    """Trains a model, saves it and its optimizer with plain DCP, and returns the weights, whole, after another step."""
    model, optimizer = _model_and_optimizer(by)
    _step(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    _step(model, optimizer)
    return _whole(model)


def resumed(rank: int, world: int, folder: str, by: str) -> dict[str, torch.Tensor]:
    """Loads that into fresh objects on another number of ranks, and returns the weights after the same other step."""
    torch.manual_seed(100)
    model, optimizer = _model_and_optimizer(by)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=Path(folder))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _step(model, optimizer)
    return _whole(model)


WRAPS: dict[str, Callable[..., Any]] = {"ours": fully_shard, "theirs": torch_fully_shard}


def _model_and_optimizer(by: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    by_layers(WRAPS[by], model)
    return model, adamw(model.parameters())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # The same batch on every rank: however many there are, the mean is the same.
    squared(model, torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full_tensor(param).detach() for name, param in model.named_parameters()}
