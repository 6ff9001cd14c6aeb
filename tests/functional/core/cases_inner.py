"""Cases: parameters that another parallelism has divided already (field case R15)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megatron_fsdp_v2 import clip_grad_norm_, full_tensor, fully_shard
from tests.functional.core.cases_support import STRATEGIES, Ranks, adamw, case, refused

ROWS, COLUMNS = 4, 6


class RowParallel(nn.Module):
    """A linear layer whose weight is cut along the columns over a mesh; its input is whole on every rank."""

    def __init__(self, weight: torch.Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(1)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        return (part @ self.weight.t()).full_tensor()


@case(worlds=(4,), strategies=STRATEGIES)
def weight_cut_by_columns(ranks: Ranks, strategy: str) -> None:
    """(4, 6) over tensor-parallel 2, so (4, 3) locally, sharded further over data-parallel 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = torch.randn(ROWS, COLUMNS)
    model: Any = RowParallel(weight, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], strategy=strategy)
    group = model._fsdp_unit.groups[0]
    assert group.layout.param_numel == ROWS * COLUMNS // 2, "the buffer holds the local part, not the global one"
    assert model.weight.to_local().shape == (ROWS if strategy == "no_shard" else ROWS // 2, COLUMNS // 2)
    reference = nn.Linear(COLUMNS, ROWS, bias=False)
    reference.weight = nn.Parameter(weight.clone())
    optimizers = [adamw(model.parameters()), adamw(reference.parameters())]
    for _ in range(3):
        for _ in range(3):
            data = torch.randn(2, 5, COLUMNS)
            model(data[mesh.get_local_rank("dp")]).square().mean().backward()
            reference(data).square().mean().backward()
        ours = clip_grad_norm_(model.parameters(), 1.0)
        theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        torch.testing.assert_close(ours, theirs)
        assert model.weight.grad.to_local().shape[1] == COLUMNS // 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(full_tensor(model.weight), reference.weight.detach(), rtol=1e-5, atol=1e-6)


class Experts(nn.Module):
    """Two experts in one weight."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nd,edf->enf", x, self.weight)


@case(worlds=(4,), strategies=STRATEGIES)
def experts_held_as_plain_local_weights(ranks: Ranks, strategy: str) -> None:
    """(4, 3, 2) over expert-parallel 2: each rank's plain (2, 3, 2) is sharded over its own expert-data ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_dp", "ep"))
    weight = torch.randn(4, 3, 2)
    mine = weight.chunk(2)[mesh.get_local_rank("ep")]
    model = fully_shard(Experts(mine), mesh=mesh["expert_dp"], strategy=strategy)
    assert model._fsdp_unit.groups[0].layout.full_numel == mine.numel(), "the buffer is ep times too large"  # type: ignore[attr-defined]
    reference = Experts(mine)
    optimizers = [adamw(model.parameters()), adamw(reference.parameters())]
    for _ in range(3):
        for _ in range(3):
            data = torch.randn(2, 5, 3)
            model(data[mesh.get_local_rank("expert_dp")]).square().mean().backward()
            torch.stack([reference(part).square().mean() for part in data]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(full_tensor(model.weight), reference.weight.detach(), rtol=1e-5, atol=1e-6)


class ColumnParallel(nn.Module):
    """A linear layer whose weight and bias are cut along the rows over a mesh; its input and output are whole."""

    def __init__(self, reference: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(reference.weight.detach(), mesh, [Shard(0)]))
        self.bias = nn.Parameter(distribute_tensor(reference.bias.detach(), mesh, [Shard(0)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = DTensor.from_local(x, self.mesh, [Replicate()])
        return nn.functional.linear(whole, self.weight, self.bias).full_tensor()


@case(worlds=(4,), strategies=STRATEGIES)
def weights_cut_by_rows(ranks: Ranks, strategy: str) -> None:
    """(7, 6) over tensor-parallel 2, so 4 and 3 rows locally, sharded further over data-parallel 2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = nn.Linear(6, 7)
    model: Any = fully_shard(ColumnParallel(reference, mesh["tp"]), mesh=mesh["dp"], strategy=strategy)
    assert model.weight.shape == (7, 6)
    optimizers = [adamw(model.parameters()), adamw(reference.parameters())]
    for _ in range(3):
        for _ in range(3):
            data = torch.randn(2, 5, 6)
            model(data[mesh.get_local_rank("dp")]).square().mean().backward()
            reference(data).square().mean().backward()
        ours = clip_grad_norm_(model.parameters(), 1.0)
        torch.testing.assert_close(ours, torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(ours), theirs.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=1e-5, atol=1e-6)


@case(worlds=(4,))
def partial_weights_are_refused_by_name(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh["tp"], [Partial()]))
    with refused(ValueError, "Linear.weight", "Partial"):
        fully_shard(model, mesh=mesh["dp"])
    with refused(ValueError, "Linear.weight"):
        fully_shard(model, mesh=mesh["tp"])


class LocalRowParallel(nn.Module):
    """As `RowParallel`, with a plain weight: this rank's columns, and its own sum over the mesh."""

    def __init__(self, weight: torch.Tensor, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(weight.chunk(2, dim=1)[mesh.get_local_rank()].clone())
        self.scale = nn.Parameter(torch.ones(ROWS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(self.weight) is nn.Parameter
        assert not isinstance(self.weight, DTensor)
        part = x.chunk(2, dim=-1)[self.mesh.get_local_rank()]
        return DTensor.from_local(part @ self.weight.t(), self.mesh, [Partial()]).full_tensor() * self.scale


@case(worlds=(4,), strategies=STRATEGIES)
def plain_parts_of_larger_weights(ranks: Ranks, strategy: str) -> None:
    """At rest the parameter is the whole one, on the mesh of both parallelisms; the module has its plain part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = torch.randn(ROWS, COLUMNS)
    model: Any = LocalRowParallel(weight, mesh["tp"])
    placements = {model.weight: [Shard(1)], model.scale: [Replicate()]}
    fully_shard(
        model, mesh=mesh["dp"], strategy=strategy, inner_sharding_fn=lambda param: (mesh["tp"], placements[param])
    )
    assert (model.weight.shape, model.scale.shape) == ((ROWS, COLUMNS), (ROWS,))
    assert model._fsdp_unit.groups[0].layout.param_numel == ROWS * COLUMNS // 2 + ROWS
    reference = RowParallel(weight, mesh["tp"])
    reference.weight = nn.Parameter(weight.clone())
    scale = nn.Parameter(torch.ones(ROWS))
    optimizers = [adamw(model.parameters()), adamw([reference.weight, scale])]
    for _ in range(3):
        data = torch.randn(2, 5, COLUMNS)
        model(data[mesh.get_local_rank("dp")]).square().mean().backward()
        (data @ reference.weight.t() * scale).square().mean().backward()
        ours = clip_grad_norm_(model.parameters(), 1.0)
        torch.testing.assert_close(ours, torch.nn.utils.clip_grad_norm_([reference.weight, scale], 1.0))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in ((model.weight, reference.weight), (model.scale, scale)):
        torch.testing.assert_close(full_tensor(ours), theirs.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours.full_tensor(), theirs.detach(), rtol=1e-5, atol=1e-6)


@case(worlds=(4,))
def wrong_answers_about_parts_are_refused_by_name(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    answers: list[tuple[type[Exception], Any]] = [
        (TypeError, Shard(0)),
        (ValueError, (mesh["tp"], [Shard(2)])),
        (ValueError, (mesh["tp"], [Shard(0), Shard(1)])),
        (ValueError, (mesh["tp"], [Partial()])),
        (ValueError, (mesh["dp"], [Shard(0)])),
    ]
    for kind, answer in answers:
        with refused(kind, "Linear.weight"):
            fully_shard(nn.Linear(4, 4), mesh=mesh["dp"], inner_sharding_fn=lambda param, said=answer: said)
    with refused(TypeError, "inner_sharding_fn"):
        fully_shard(nn.Linear(4, 4), mesh=mesh["dp"], inner_sharding_fn={})  # type: ignore[arg-type]
