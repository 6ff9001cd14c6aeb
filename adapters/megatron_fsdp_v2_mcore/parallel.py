"""Data-parallel meshes from the process groups that Megatron-Core has made."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from torch.distributed.device_mesh import DeviceMesh

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


def data_parallel_mesh(
    ddp_config: DistributedDataParallelConfig, pg_collection: Any, device: torch.device
) -> DeviceMesh:
    """The mesh to shard over: 1-D, or (outer, inner) when there are several optimizer instances.

    Groups come from `pg_collection`, or from `parallel_state` if that is None; none is created here.

    Raises:
        ValueError: the groups of the instances don't form a grid.
    """
    whole = data_parallel_group(pg_collection)
    if ddp_config.num_distributed_optimizer_instances == 1:
        return DeviceMesh.from_group(whole, device.type, mesh_dim_names=(SHARD_AXIS,))
    outer, inner = _instance_groups(pg_collection)
    ranks = torch.tensor(dist.get_process_group_ranks(whole), dtype=torch.int)
    if ranks.numel() != outer.size() * inner.size():
        raise ValueError(
            f"{ranks.numel()} data-parallel ranks are not {outer.size()} optimizer instances of {inner.size()} ranks"
        )
    grid = ranks.view(outer.size(), inner.size())
    _check_grid(grid, outer, inner)
    return DeviceMesh.from_group([outer, inner], device.type, mesh=grid, mesh_dim_names=(OUTER_AXIS, SHARD_AXIS))


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
