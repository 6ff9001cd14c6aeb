"""Meshes from the process groups that Megatron-Core has made, and what tensor parallelism cut parameters into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

TENSOR_AXIS = "tp"
OUTER_AXIS = "dp_outer"
SHARD_AXIS = "dp_shard"


def compute_device() -> torch.device:
    """Where parameters live while training: this process's accelerator, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def data_parallel_group(pg_collection: Any) -> dist.ProcessGroup:
    """All ranks that see different data: data and context parallel."""
    if pg_collection is None:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return pg_collection.dp_cp


def model_group(pg_collection: Any) -> dist.ProcessGroup:
    """All ranks that hold parts of the same layers: tensor, data and context parallel."""
    group = getattr(pg_collection, "tp_dp_cp", None)
    return group or parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


@dataclass(frozen=True)
class ModelMeshes:
    """The mesh to shard over, 1-D or (outer, inner), and that of tensor parallelism; None where that has one rank."""

    data_parallel: DeviceMesh
    tensor_parallel: DeviceMesh | None

    def part(self, parameter: nn.Parameter) -> tuple[DeviceMesh, Sequence[Placement]] | None:
        """How the larger tensor was cut that `parameter` is this rank's part of, by Megatron's own marks on it."""
        if self.tensor_parallel is None:
            return None
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        placement = Shard(parameter.partition_dim) if is_cut else Replicate()  # type: ignore[attr-defined]
        return self.tensor_parallel, (placement,)


def model_meshes(ddp_config: DistributedDataParallelConfig, pg_collection: Any, device: torch.device) -> ModelMeshes:
    """The meshes of a model. With tensor parallelism both are slices of one.

    Groups come from `pg_collection`, or from `parallel_state` if that is None; none is created here.

    Raises:
        ValueError: the groups don't form a grid.
    """
    whole = data_parallel_group(pg_collection)
    grid = torch.tensor(dist.get_process_group_ranks(whole), dtype=torch.int)
    groups, names = [whole], [SHARD_AXIS]
    if ddp_config.num_distributed_optimizer_instances > 1:
        groups, names = list(_instance_groups(pg_collection)), [OUTER_AXIS, SHARD_AXIS]
        grid = _instance_grid(grid, *groups)
    tensor_parallel = _tensor_parallel_group(pg_collection)
    if tensor_parallel.size() == 1:
        return ModelMeshes(_mesh(groups, grid, names, device), None)
    grid = _grid_over(tensor_parallel, grid, model_group(pg_collection))
    mesh = _mesh([tensor_parallel, *groups], grid, [TENSOR_AXIS, *names], device)
    return ModelMeshes(mesh[tuple(names)], mesh[TENSOR_AXIS])


def _mesh(groups: list[dist.ProcessGroup], grid: torch.Tensor, names: list[str], device: torch.device) -> DeviceMesh:
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=tuple(names))
    return DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=tuple(names))


def _tensor_parallel_group(pg_collection: Any) -> dist.ProcessGroup:
    return parallel_state.get_tensor_model_parallel_group() if pg_collection is None else pg_collection.tp


def _grid_over(group: dist.ProcessGroup, grid: torch.Tensor, members: dist.ProcessGroup) -> torch.Tensor:
    """The grids of all ranks of `group`, one after the other, from that of this rank.

    Megatron numbers ranks so that a step along one axis is the same number everywhere.
    """
    steps = torch.tensor(dist.get_process_group_ranks(group), dtype=torch.int) - dist.get_rank()
    grids = grid + steps.view(-1, *[1] * grid.ndim)
    expected = sorted(dist.get_process_group_ranks(members))
    if sorted(grids.flatten().tolist()) != expected:
        raise ValueError(
            f"tensor-parallel ranks {dist.get_process_group_ranks(group)} and data-parallel ranks "
            f"{grid.flatten().tolist()} do not make up the ranks {expected} of their common group"
        )
    return grids


def _instance_grid(ranks: torch.Tensor, outer: dist.ProcessGroup, inner: dist.ProcessGroup) -> torch.Tensor:
    if ranks.numel() != outer.size() * inner.size():
        raise ValueError(
            f"{ranks.numel()} data-parallel ranks are not {outer.size()} optimizer instances of {inner.size()} ranks"
        )
    grid = ranks.view(outer.size(), inner.size())
    _check_grid(grid, outer, inner)
    return grid


def _instance_groups(pg_collection: Any) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    if pg_collection is not None:
        return pg_collection.inter_dist_opt, pg_collection.intra_dp_cp
    return (
        parallel_state.get_inter_distributed_optimizer_instance_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
    )


def _check_grid(grid: torch.Tensor, outer: dist.ProcessGroup, inner: dist.ProcessGroup) -> None:
    row, column = (grid == dist.get_rank()).nonzero()[0].tolist()
    for name, group, expected in (
        ("within an instance", inner, grid[row]),
        ("across instances", outer, grid[:, column]),
    ):
        ranks = dist.get_process_group_ranks(group)
        if ranks != expected.tolist():
            raise ValueError(f"optimizer instances: the group {name} has ranks {ranks}, expected {expected.tolist()}")
