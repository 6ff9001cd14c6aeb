"""Parameters of one unit that are alike: one layout, and the buffers of their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, is_
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..memory.allocator import ALL_GATHER, BucketAllocator
from ..memory.host_copies import Kind
from ..offload import Rest
from ..precision import GroupPrecision
from ..strategy import Placement as BufferPlacement
from ..strategy import Strategy
from .buffer import DataParallelBuffer, Placements, redistribute
from .dtensor import RowShard, build_dtensor
from .gradients import GroupGradients
from .layout import GroupLayout, plan_layout
from .mesh import DataParallelMesh
from .transient import TransientBuffer

_version = attrgetter("_version")
_requires_grad = attrgetter("requires_grad")
_local_tensor = attrgetter("_local_tensor")

# Attributes of a parameter that belong to the object: what makes it a DTensor, and the mark of its unit.
_NOT_COPIED = ("_spec", "_local_tensor", "_fsdp_owner")


@dataclass(eq=False)
class ParamSource:
    """A parameter before sharding: its names and owners (several if it is tied within the unit).

    ``declared`` is the spec of the larger tensor that a plain parameter is this rank's part of.
    """

    name: str
    owners: list[tuple[nn.Module, str]]
    original: nn.Parameter
    declared: DTensorSpec | None = None

    @property
    def computed_spec(self) -> DTensorSpec | None:
        """The spec of the DTensor that modules compute with, if the parameter came as one."""
        return self.original._spec if isinstance(self.original, DTensor) else None

    @property
    def inner_spec(self) -> DTensorSpec | None:
        """The spec another parallelism gave the parameter."""
        return self.computed_spec or self.declared

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return tuple(self.inner_spec.shape if self.inner_spec else self.original.shape)

    @property
    def attributes(self) -> dict[str, Any]:
        """What users attached to the parameter object."""
        return {key: value for key, value in vars(self.original).items() if key not in _NOT_COPIED}

    @property
    def local(self) -> torch.Tensor:
        """The tensor data parallelism cuts: the local one of a DTensor."""
        tensor = self.original.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ParameterGroup:
    """Weights of a group: the main weights at rest, the weights to compute with, and their gathered form.

    ``sharded_params`` are the DTensor parameters seen at rest. ``unsharded_params`` are the plain parameters the
    module computes with; they are views of the gathered buffer and exist after ``prepare``.
    """

    def __init__(
        self,
        sources: Sequence[ParamSource],
        mesh: DataParallelMesh,
        strategy: Strategy,
        precision: GroupPrecision,
        rest: Rest | None = None,
    ) -> None:
        self.names = [source.name for source in sources]
        self.owners = [source.owners for source in sources]
        self.mesh = mesh
        self.strategy = strategy
        self.precision = precision
        self.rest = rest
        self.trainable = sources[0].original.requires_grad
        # A 1-D cut leaves less padding, so the outer axis takes part in the plan only where something is cut by it.
        pieces = mesh.shard.size * (mesh.outer.size if mesh.outer and self._cut_by_outer else 1)
        self.layout: GroupLayout = plan_layout([tuple(source.local.shape) for source in sources], pieces)
        self._allocate_weights()
        # What users write to a shard counts in the version of these, and gathers into the buffer it is part of don't.
        self.aliases = [piece.data for piece in self.main.pieces]
        self._aliased = DataParallelBuffer(self.layout, mesh, self.main.placements, self.aliases)
        self.sharded_params: list[nn.Parameter] = [
            self._sharded_param(index, source) for index, source in enumerate(sources)
        ]
        self.local_params: list[torch.Tensor] = [
            param._local_tensor  # type: ignore[attr-defined]
            for param in self.sharded_params
        ]
        self._attributes = [source.attributes for source in sources]
        self._computed_specs = [source.computed_spec for source in sources]
        self.unsharded_params: list[nn.Parameter] = []
        self.gradients: GroupGradients | None = None
        if self.trainable:
            self.gradients = GroupGradients(self.layout, mesh, strategy, precision, rest, self.sharded_params)
        self._writes = 0
        self._gathered_writes = 0
        self._compute_version: int | None = None
        self._full_version: int | None = None
        self._copied: TransientBuffer | None = None
        self._part: TransientBuffer | None = None
        self._part_version: int | None = None

    def prepare(self, allocator: BucketAllocator, label: str) -> None:
        """Build the parameters to compute with. Needed once, before the first ``start_gather``. ``label`` names it."""
        self._allocator = allocator
        self._label = label
        if self.rest is not None:
            self._prepare_compute()
        self.full = self.compute
        if self.gathers_per_use:
            self._transient = self._transient_weights(self.mesh, self.gathered_placements, "weights")
            self._acquire_full()
        for index in range(len(self.names)):
            self.unsharded_params.append(self._unsharded_param(index))
        self.release()
        self._gathered_writes = self.gathered_version()
        if self.gradients:
            self.gradients.prepare(allocator, self.unsharded_params, label)

    def _transient_weights(self, mesh: DataParallelMesh, placements: Placements, role: str) -> TransientBuffer:
        name, dtype = f"{self._label} {role}", self.precision.compute
        return TransientBuffer(self._allocator, self.layout, mesh, placements, dtype, arena=ALL_GATHER, name=name)

    def _acquire_full(self) -> DataParallelBuffer:
        full = self._transient.acquire()
        if full is not self.full:
            self._bind_full(full)
        return full

    @torch.inference_mode(False)
    def _bind_full(self, full: DataParallelBuffer) -> None:
        """Have what computes read the gathered weights here from now on."""
        self.full = full
        self.full_memory = memory_of(full.pieces[0])
        for param, view in zip(self.unsharded_params, self._transient.views, strict=False):
            if isinstance(param, DTensor):
                param._local_tensor = view
            else:
                param.data = view
        if self._part is not None:
            self._part_of_full = self._part.part_of(full)

    @property
    def memory_generation(self) -> int:
        """Grows when views of the gathered weights that autograd may hold become void."""
        return self._allocator.generation if self.gathers_per_use else 0

    @property
    def gathers_per_use(self) -> bool:
        """Whether the gathered weights are a transient buffer that each use fills."""
        return self.strategy.weights_resharded

    def main_version(self) -> int:
        """A number that grows whenever main weights are known to have been written."""
        version: int = self._writes + sum(map(_version, self.sharded_params)) + sum(map(_version, self.aliases))
        return version

    def gathered_version(self) -> int:
        """A number that grows whenever somebody else than a gather is known to have written the gathered weights."""
        return sum(map(_version, self.unsharded_params))

    def is_untouched(self) -> bool:
        """Whether the parameters still are what was made of them, and gathered weights were not written."""
        params = self.sharded_params
        return (
            list(map(_requires_grad, params)).count(self.trainable) == len(params)
            and all(map(is_, map(_local_tensor, params), self.local_params))
            and self._gathered_writes == self.gathered_version()
        )

    def lost_writes(self) -> bool:
        """Whether gathered weights were written since the last call. Main weights don't hear of it."""
        before, self._gathered_writes = self._gathered_writes, self.gathered_version()
        if before == self._gathered_writes:
            return False
        self.mark_updated()
        return True

    def mark_updated(self) -> None:
        """Declare that main weights were written in a way no version counter shows."""
        self._writes += 1

    def is_gathered(self, version: int) -> bool:
        """Whether the gathered buffer holds this version of the main weights."""
        return self._full_version == version

    def reads_main(self, version: int) -> bool:
        """Whether bringing weights up to ``version`` starts from the main weights."""
        return self._compute_version != version

    def resting_storages(self) -> Iterator[tuple[Kind, torch.UntypedStorage]]:
        """Memory of the device that the group holds between passes; the same storage maybe twice. After ``prepare``."""
        if self.rest is None or not self.gathers_per_use:
            yield Kind.COMPUTE_WEIGHTS, self.compute.pieces[0].untyped_storage()
        if self.rest is None:
            yield Kind.MAIN_WEIGHTS, self.main.pieces[0].untyped_storage()
        if self.gradients is not None:
            for storage in self.gradients.resting_storages():
                yield Kind.MAIN_GRADIENTS, storage

    def start_gather(self, version: int) -> tuple[DataParallelBuffer, DataParallelBuffer] | None:
        """Bring weights up to ``version`` as far as that needs no last all-gather; return that one's (source, target).

        None where nothing is left to gather. The caller issues the gather, so that the groups of a unit share one call.
        """
        if self._part is not None and self._part_version == version:
            self._full_version = version
            return self._part.buffer, self._acquire_full()
        steps: list[tuple[DataParallelBuffer, DataParallelBuffer]] = []
        if self._compute_version != version:
            self._acquire_copied()
            if self.main is not self._own_compute:
                pinned = self.rest is not None and self.rest.pinned
                torch._foreach_copy_(list(self._own_compute.pieces), list(self.main.pieces), non_blocking=pinned)
            steps = list(self._refresh_steps)
        last = None
        if self.gathers_per_use:
            last = (self.compute, self._acquire_full())
        elif steps:
            last = steps.pop()
        for source, target in steps:
            work = redistribute(source, target)
            if work is not None:
                work.wait()
        self._compute_version = self._full_version = version
        return last

    def prepare_part(self, neighbours: DataParallelMesh) -> None:
        """Build what ``keep_part`` keeps: this rank's part of weights that some ranks of the shard axis share."""
        if self.gathers_per_use:
            sharded = Placements(BufferPlacement.SHARDED, self.full.placements.outer)
            self._part = self._transient_weights(neighbours, sharded, "part of weights")
            self._part_of_full = self._part.part_of(self._acquire_full())
            self.release()

    def keep_part(self) -> None:
        """Copy this rank's part of the gathered weights, for a later gather among fewer ranks."""
        if self._part is not None and self._full_version is not None:
            torch._foreach_copy_(list(self._part.acquire().pieces), list(self._part_of_full.pieces))
            self._part_version = self._full_version

    def drop_part(self) -> None:
        """Give the memory of the kept part back."""
        if self._part is not None:
            self._part.free()
            self._part_version = None

    def release(self) -> None:
        """Give the gathered weights' memory back, if they are a transient buffer."""
        if self.gathers_per_use:
            self._full_version = None
            self._transient.free()
            if self._copied is not None:
                self._compute_version = None
                self._copied.free()

    @property
    def _cut_by_outer(self) -> bool:
        return self.strategy.outer is not None and self.strategy.outer.main is BufferPlacement.SHARDED

    @property
    def refresh_path(self) -> list[Placements]:
        """Placements that written weights pass: of the main weights, ..., of the compute weights; maybe only one.

        The outer axis comes first, since it cuts the pieces of the shard axis.
        """
        shard, outer = self.strategy.shard, self.strategy.outer
        main = Placements(shard.main, outer.main if outer else None)
        compute = Placements(shard.compute, outer.compute if outer else None)
        return list(dict.fromkeys([main, Placements(main.shard, compute.outer), compute]))

    @property
    def gathered_placements(self) -> Placements:
        """Placements of the weights while a module computes with them."""
        return Placements(BufferPlacement.REPLICATED, self.refresh_path[-1].outer)

    def _allocate_weights(self) -> None:
        path = self.refresh_path
        main, at_rest = path[0], path[-1]
        if self.rest is not None:
            self.main = DataParallelBuffer.allocate(self.layout, self.mesh, main, self.precision.main, self.rest)
            return
        self._set_compute(DataParallelBuffer.allocate(self.layout, self.mesh, at_rest, self.precision.compute))
        self.main = self._own_compute
        if self.precision.main is not self.precision.compute:
            self.main = DataParallelBuffer.allocate(self.layout, self.mesh, main, self.precision.main)

    def _prepare_compute(self) -> None:
        """Weights that rest elsewhere are copied for computing: for every use where others hold the rest of them."""
        at_rest = self.refresh_path[-1]
        if not self.gathers_per_use:
            self._set_compute(DataParallelBuffer.allocate(self.layout, self.mesh, at_rest, self.precision.compute))
            return
        self._copied = self._transient_weights(self.mesh, at_rest, "copied shard")
        self._set_compute(self._copied.acquire())
        self._copied.free()

    def _acquire_copied(self) -> None:
        if self._copied is not None:
            copied = self._copied.acquire()
            if copied is not self.compute:
                self._set_compute(copied)

    def _set_compute(self, compute: DataParallelBuffer) -> None:
        self.compute = compute
        stops = [compute.part(placements) for placements in self.refresh_path]
        self._own_compute = stops[0]
        self._refresh_steps = list(pairwise(stops))

    def _sharded_param(self, index: int, source: ParamSource) -> nn.Parameter:
        rows = self._aliased.param_rows(index)
        split = self.layout.split(index, self.main.shards).range(self.main.index)
        with torch.no_grad():
            rows.copy_(source.local[split.start : split.start + split.count])
        mesh, placements = self._at_rest_spec(index, source.inner_spec)
        # nn.Parameter detaches, and the result would take over the storage offset: see build_dtensor.
        param = nn.Parameter(
            build_dtensor(rows.new_empty(0), mesh, placements, source.shape),
            requires_grad=source.original.requires_grad,
        )
        param._local_tensor = rows  # type: ignore[attr-defined]
        vars(param).update(source.attributes)
        return param

    def _at_rest_spec(self, index: int, inner: DTensorSpec | None) -> tuple[DeviceMesh, list[Placement]]:
        outer_cut = self._cut_by_outer
        shards, mesh = self.mesh.shard.size, self.mesh.device_mesh
        cut: list[Placement]
        if self.main.placements.shard is BufferPlacement.REPLICATED:
            cut = [Replicate()] * mesh.ndim
        elif outer_cut:
            assert self.mesh.outer is not None
            nested = self.layout.nested_split(index, shards, self.mesh.shard.index, self.mesh.outer.size)
            mesh, cut = self.mesh.nested_mesh, [RowShard(self.layout.split(index, shards)), RowShard(nested)]
        else:
            cut = [*[Replicate()] * (mesh.ndim - 1), RowShard(self.layout.split(index, shards))]
        if inner is None:
            return mesh, cut
        return self.mesh.below(inner.mesh, nested=outer_cut), [*inner.placements, *cut]

    def _unsharded_param(self, index: int) -> nn.Parameter:
        view = self.full.param_rows(index)
        inner = self._computed_specs[index]
        if inner is not None:
            param = nn.Parameter(build_dtensor(view, inner.mesh, inner.placements, tuple(inner.shape)), self.trainable)
        else:
            # Assigning data keeps the parameter's own version counter: refilling the buffer for backward must not
            # look to autograd like a change of what forward saved.
            param = nn.Parameter(torch.empty(0, dtype=view.dtype, device=view.device), self.trainable)
            param.data = view
        vars(param).update(self._attributes[index])
        return param


def memory_of(tensor: torch.Tensor) -> int | None:
    """Identifies the storage of a tensor; None for tensors that have none of their own."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return None
    address: int = tensor.untyped_storage()._cdata
    return address
