"""Parameters that are this rank's part of a larger one: what tensor or expert parallelism left to data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .dtensor import RowShard
from .mesh import DataParallelMesh


def spec_of_part(part: torch.Tensor, answer: object, name: str) -> DTensorSpec | None:
    """The spec of the tensor that a plain one is this rank's part of; None if it's whole.

    Args:
        part: the plain tensor, of the same shape on every rank of the mesh.
        answer: None, or the mesh over which the larger tensor was cut and a placement for each of its dimensions.
        name: of the parameter, for errors.

    Raises:
        TypeError: the answer isn't a pair of a DeviceMesh and placements.
        ValueError: there are more or fewer placements than mesh dimensions, or a placement is of a dimension that the
            tensor doesn't have.
    """
    if answer is None:
        return None
    if isinstance(part, DTensor):
        raise ValueError(f"inner_sharding_fn answered {answer} for {name}, which is a DTensor and says so itself")
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], DeviceMesh)):
        raise TypeError(f"inner_sharding_fn must answer None or (mesh, placements), got {answer!r} for {name}")
    mesh: DeviceMesh = answer[0]
    placements: Sequence[Placement] = tuple(answer[1])
    if len(placements) != mesh.ndim:
        raise ValueError(f"inner_sharding_fn answered {placements} for {name} on a mesh of {mesh.ndim} dimensions")
    shape = list(part.shape)
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            if not 0 <= placement.dim < part.ndim:
                raise ValueError(f"inner_sharding_fn answered {placement} for {name} of shape {tuple(part.shape)}")
            shape[placement.dim] *= mesh.size(dim)
    size = torch.Size(shape)
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), part.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def check_inner_spec(spec: DTensorSpec, name: str, axes: DataParallelMesh) -> None:
    """Refuse what data parallelism can't cut further.

    Raises:
        ValueError: the parameter is sharded by data parallelism already, lies on a mesh that shares a dimension with
            the data-parallel one or has none with a name, or is neither replicated nor evenly sharded.
    """
    if any(isinstance(placement, RowShard) for placement in spec.placements):
        raise ValueError(f"parameter {name} is sharded already, by another call of fully_shard")
    if set(spec.mesh.mesh_dim_names or ("",)) & set(axes.device_mesh.mesh_dim_names or ("",)):
        raise ValueError(
            f"parameter {name} is a DTensor on the mesh {spec.mesh} already; it can be sharded further only "
            "over another named dimension of the same mesh"
        )
    if any(type(placement) not in (Replicate, Shard) for placement in spec.placements):
        raise ValueError(
            f"parameter {name} has placements {spec.placements}; only DTensors that are replicated or evenly sharded "
            "can be sharded further"
        )
