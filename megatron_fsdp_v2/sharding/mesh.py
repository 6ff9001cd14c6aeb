"""The data-parallel axes of a unit, taken from a DeviceMesh."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class MeshAxis:
    """One data-parallel axis: its process group, size, and this rank's index in it."""

    group: dist.ProcessGroup
    size: int
    index: int


@dataclass(frozen=True, eq=False)
class DataParallelMesh:
    """The shard axis and, on a 2-D mesh, the outer axis. Mesh dimensions are ordered (outer, shard) as in FSDP2."""

    device_mesh: DeviceMesh
    shard: MeshAxis
    outer: MeshAxis | None
    device: torch.device
    _joined: dict[tuple[DeviceMesh, bool], DeviceMesh] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        return self.shard.size * (self.outer.size if self.outer else 1)

    @cached_property
    def nested_mesh(self) -> DeviceMesh:
        """The 2-D mesh with dimensions (shard, outer), for tensors cut by the shard axis first."""
        assert self.outer is not None
        names = self.device_mesh.mesh_dim_names or ("outer", "shard")
        return DeviceMesh.from_group(
            [self.shard.group, self.outer.group],
            self.device_mesh.device_type,
            mesh=self.device_mesh.mesh.t().contiguous(),
            mesh_dim_names=(names[1], names[0]),
        )

    def below(self, inner: DeviceMesh, nested: bool) -> DeviceMesh:
        """The mesh of a tensor that was cut over ``inner`` before data parallelism: its dimensions, then ours.

        A DTensor's placements are applied in the order of its mesh, so what was cut first comes first. ``nested`` puts
        the shard axis before the outer one.

        Raises:
            ValueError: ``inner`` and the data-parallel mesh aren't named slices of one mesh.
        """
        key = (inner, nested)
        if key not in self._joined:
            self._joined[key] = self._build_below(inner, nested)
        return self._joined[key]

    def _build_below(self, inner: DeviceMesh, nested: bool) -> DeviceMesh:
        own = list(self.device_mesh.mesh_dim_names or ())
        order = [*(inner.mesh_dim_names or ()), *(reversed(own) if nested else own)]
        root = self.device_mesh._get_root_mesh()
        if len(order) != self.device_mesh.ndim + inner.ndim or root != inner._get_root_mesh():
            raise ValueError(
                "a DTensor parameter can be sharded further only if its mesh and the data-parallel mesh are named "
                f"slices of one mesh; got {inner} and {self.device_mesh}"
            )
        joined = root[tuple(sorted(order, key=(root.mesh_dim_names or ()).index))]
        dims = [(joined.mesh_dim_names or ()).index(name) for name in order]
        return DeviceMesh.from_group(
            [joined.get_group(dim) for dim in dims],
            joined.device_type,
            mesh=joined.mesh.permute(dims).contiguous(),
            mesh_dim_names=tuple(order),
        )


def among_neighbours(mesh: DataParallelMesh, ranks: int) -> DataParallelMesh:
    """The mesh with its shard axis cut down to the ``ranks`` neighbours this rank is among.

    A collective of those neighbours, since it makes a process group of them.
    """
    index = mesh.shard.index % ranks
    first = mesh.shard.index - index
    members = dist.get_process_group_ranks(mesh.shard.group)[first : first + ranks]
    group = dist.new_group(members, use_local_synchronization=True)
    return replace(mesh, shard=MeshAxis(group, ranks, index))


def data_parallel_mesh(mesh: DeviceMesh | None) -> DataParallelMesh:
    """Read the data-parallel axes of ``mesh``; None takes all ranks as one shard axis.

    Raises:
        TypeError: ``mesh`` isn't a DeviceMesh.
        ValueError: it has more than two dimensions, lists ranks in another than ascending order, doesn't contain this
            rank, or its device type isn't available.
        RuntimeError: there's no process group to build a default mesh from.
    """
    if mesh is None:
        if not dist.is_initialized():
            raise RuntimeError("fully_shard needs a process group: call torch.distributed.init_process_group first")
        mesh = init_device_mesh(_default_device_type(), (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh must be 1-D (shard) or 2-D (outer, shard), got {mesh.ndim} dimensions: {mesh}")
    if any(bool((mesh.mesh.diff(dim=dim) <= 0).any()) for dim in range(mesh.ndim)):
        raise ValueError(
            f"mesh must list ranks in ascending order along each dimension, as its process groups do; got "
            f"{mesh.mesh.tolist()}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} isn't part of the mesh {mesh}")
    device = _device_of(mesh.device_type)
    shard = _axis(mesh, mesh.ndim - 1)
    return DataParallelMesh(mesh, shard, _axis(mesh, 0) if mesh.ndim == 2 else None, device)


def _axis(mesh: DeviceMesh, dim: int) -> MeshAxis:
    return MeshAxis(mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim))


def _default_device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and "nccl" in dist.get_backend() else "cpu"


def _device_of(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    module = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        raise ValueError(f"mesh is on device type {device_type!r}, which this process can't use; build a 'cpu' mesh")
    return torch.device(device_type, module.current_device())
