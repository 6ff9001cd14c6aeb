"""Gradients of one parameter group, from autograd to the optimizer.

Gradients pass *stages*, one per data-parallel axis; each stage reduces along its axis. Before every stage stands an
accumulator that exists only while reduction along the axis is put off. Behind the last stage stand the main gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..memory.allocator import BucketAllocator, BufferSpec
from ..precision import GroupPrecision
from ..strategy import AxisStrategy, Placement, Strategy
from .buffer import DataParallelBuffer, Placements, piece_sizes, redistribute
from .collectives import Work
from .dtensor import build_dtensor
from .layout import GroupLayout
from .mesh import DataParallelMesh


class GroupGradients:
    """Collects, accumulates, reduces and exposes the gradients of a group.

    ``collect`` takes what autograd left on the unsharded parameters; the iterator of ``reduce`` then runs stages and
    yields each collective for the caller to wait on; ``release`` gives back the transient memory.
    """

    def __init__(
        self,
        layout: GroupLayout,
        mesh: DataParallelMesh,
        strategy: Strategy,
        precision: GroupPrecision,
        sharded_params: Sequence[nn.Parameter],
        names: Sequence[str],
    ) -> None:
        self._layout = layout
        self._mesh = mesh
        self._precision = precision
        self._sharded_params = sharded_params
        self._names = names
        axes: list[AxisStrategy] = [strategy.shard, *([strategy.outer] if strategy.outer else [])]
        self._deferred = [axis.deferred for axis in axes]
        self._levels = _stage_placements(strategy)
        self.pending: list[DataParallelBuffer | None] = [None] * len(axes)
        self.main: DataParallelBuffer | None = None
        self._exposed: DataParallelBuffer | None = None
        self._grads: list[DTensor] = []
        self._op = dist.ReduceOp.AVG
        self._scale = 1.0
        self._unsharded_params: Sequence[nn.Parameter] = ()
        self._source: DataParallelBuffer | None = None
        self._to_expose = False

    def prepare(self, allocator: BucketAllocator, unsharded_params: Sequence[nn.Parameter]) -> None:
        """Build the flat buffer new gradients are written to, with a view per parameter."""
        self._allocator = allocator
        self._unsharded_params = unsharded_params
        self._flat_spec = BufferSpec(self._layout.full_numel, self._precision.comm, self._mesh.device)
        flat = allocator.allocate(self, self._flat_spec)
        sizes = [self._layout.chunk(segment, 1) for segment in range(len(self._layout.chunks))]
        self._flat = DataParallelBuffer(self._layout, self._mesh, self._levels[0], flat.split(sizes))
        self._flat_views = self._views(self._flat)
        allocator.free(self)

    @property
    def stages(self) -> int:
        return len(self.pending)

    @property
    def stages_before_deferred(self) -> int:
        """Stages that run for a micro-batch that isn't the last of its step."""
        return self._deferred.index(True) if True in self._deferred else self.stages

    @property
    def has_pending(self) -> bool:
        """Whether gradients wait for a reduction that was put off."""
        return self.is_waiting_before(self.stages)

    def is_waiting_before(self, stages: int) -> bool:
        """Whether gradients wait for one of the first ``stages`` stages."""
        return any(buffer is not None for buffer in self.pending[:stages])

    @property
    def is_exposed(self) -> bool:
        """Whether the optimizer finds reduced gradients on the sharded parameters."""
        return self._sharded_params[0].grad is not None

    def set_reduction(self, average: bool, divisor: float) -> None:
        """Reduce to the average or the sum over all data-parallel ranks, divided by ``divisor``."""
        self._op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._scale = 1.0 / divisor

    def has_new(self) -> bool:
        """Whether autograd produced gradients that were not collected yet."""
        return any([param.grad is not None for param in self._unsharded_params])

    @torch.no_grad()
    def collect(self, stages: int, force: bool = False) -> bool:
        """Take new gradients in, and tell whether ``reduce(stages)`` has anything to do.

        Parameters without a gradient count as zero, since other ranks may have one for them. With ``force`` that holds
        even when no parameter has one.
        """
        new = self._take_new()
        pending = self.pending[0]
        if stages == 0 or pending is not None:
            if new:
                self._add_to_pending(new)
            self._source = None if stages == 0 else self._cast_to_comm(self.pending[0])
            if stages:
                self.pending[0] = None
            return stages > 0
        if not new and not force:
            self._source = None
            return self.is_waiting_before(stages)
        self._allocator.allocate(self, self._flat_spec)
        self._write(self._flat_views, new)
        self._source = self._flat
        return True

    @torch.no_grad()
    def reduce(self, stages: int) -> Iterator[Work]:
        """Run the first ``stages`` stages on what was collected."""
        source = self._source
        if source is not None and self._scale != 1.0:
            torch._foreach_mul_(list(source.pieces), self._scale)
        for stage in range(stages):
            if source is None:
                source = self._take_pending(stage)
                if source is None:
                    continue
            last = stage + 1 == self.stages
            fresh = last and self._bind_main()
            # Into untouched main gradients of the same dtype the reduction writes by itself.
            direct = fresh and self._precision.comm is self._precision.grads
            target = self._main_buffer if direct else self._stage_target(stage, source)
            work = redistribute(source, target, self._op)
            if work is not None:
                yield work
            self._to_expose = last
            if last and not direct:
                operation = torch._foreach_copy_ if fresh else torch._foreach_add_
                operation(list(self._main_buffer.pieces), list(target.pieces))
            elif not last:
                target = self._merge_pending(stage + 1, target, keep=stage + 1 == stages)
            source = target

    def release(self) -> None:
        """Give back the memory of the collected gradients; call once their reduction can't read it any more."""
        self._source = None
        self._allocator.free(self)

    @torch.no_grad()
    def expose(self) -> bool:
        """Make the main gradients visible as ``.grad`` where the optimizer's dtype isn't the accumulation dtype.

        True if something was reduced into them since the last call.
        """
        reduced, self._to_expose = self._to_expose, False
        if reduced and self._exposed is not None:
            torch._foreach_copy_(list(self._exposed.pieces), list(self._main_buffer.pieces))
        return reduced

    @torch.no_grad()
    def call_hooks(self) -> None:
        """Call what users registered with ``register_post_accumulate_grad_hook`` on the sharded parameters."""
        for param in self._sharded_params:
            hooks = getattr(param, "_post_accumulate_grad_hooks", None)
            for hook in list(hooks.values()) if hooks else ():
                hook(param)

    @torch.no_grad()
    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply main and pending gradients."""
        for buffer in (self.main, self._exposed, *self.pending):
            if buffer is not None:
                torch._foreach_mul_(list(buffer.pieces), factor)

    def drop_pending(self) -> None:
        """Forget gradients whose reduction was put off, and new ones."""
        self.pending = [None] * self.stages
        self.drop_new()

    def drop_new(self) -> None:
        """Forget what autograd produced and wasn't collected yet."""
        for param in self._unsharded_params:
            param.grad = None

    def _take_new(self) -> list[torch.Tensor | None]:
        grads = [param.grad for param in self._unsharded_params]
        if all([grad is None for grad in grads]):
            return []
        for param in self._unsharded_params:
            param.grad = None
        return [_local(grad, param) for grad, param in zip(grads, self._unsharded_params, strict=True)]

    def _write(self, views: list[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
        """Overwrite every view: with its gradient, or with zeros."""
        present = [grad for grad in grads if grad is not None]
        if len(present) == len(views):
            torch._foreach_copy_(views, present)
            return
        for view, grad in zip(views, grads or [None] * len(views), strict=True):
            if grad is None:
                view.zero_()
            else:
                view.copy_(grad)

    def _add_to_pending(self, grads: Sequence[torch.Tensor | None]) -> None:
        buffer = self.pending[0]
        if buffer is None:
            buffer = self.pending[0] = self._new_buffer(self._levels[0], self._precision.grads)
        pairs = [(view, grad) for view, grad in zip(self._views(buffer), grads, strict=True) if grad is not None]
        torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])

    def _take_pending(self, level: int) -> DataParallelBuffer | None:
        buffer, self.pending[level] = self.pending[level], None
        return self._cast_to_comm(buffer)

    def _merge_pending(self, level: int, reduced: DataParallelBuffer, keep: bool) -> DataParallelBuffer:
        """Add a stage's result to what waits for the next stage; ``keep`` leaves the sum waiting."""
        buffer = self.pending[level]
        if buffer is None and not keep:
            return reduced
        if buffer is None:
            buffer = self._new_buffer(self._levels[level], self._precision.grads)
        torch._foreach_add_(list(buffer.pieces), list(reduced.pieces))
        self.pending[level] = buffer if keep else None
        result = self._cast_to_comm(buffer)
        assert result is not None
        return result

    def _cast_to_comm(self, buffer: DataParallelBuffer | None) -> DataParallelBuffer | None:
        if buffer is None or buffer.dtype is self._precision.comm:
            return buffer
        pieces = [piece.to(self._precision.comm) for piece in buffer.pieces]
        return DataParallelBuffer(self._layout, self._mesh, buffer.placements, pieces)

    def _stage_target(self, stage: int, source: DataParallelBuffer) -> DataParallelBuffer:
        if self._levels[stage + 1][stage] is Placement.REPLICATED:
            return DataParallelBuffer(self._layout, self._mesh, self._levels[stage + 1], source.pieces)
        # The reduction writes all of it, so zeroing it first would be a copy for nothing.
        sizes = piece_sizes(self._layout, self._mesh, self._levels[stage + 1])
        flat = torch.empty(sum(sizes), dtype=self._precision.comm, device=self._mesh.device)
        return DataParallelBuffer(self._layout, self._mesh, self._levels[stage + 1], flat.split(sizes))

    @property
    def _main_buffer(self) -> DataParallelBuffer:
        assert self.main is not None
        return self.main

    def _bind_main(self) -> bool:
        """Bind ``.grad`` of every sharded parameter to the main gradients; True if nothing is in them to keep.

        A gradient that the user set to None starts from zero; one that the user replaced is taken over.
        """
        params = self._sharded_params
        if self.main is None:
            self._allocate_main()
        current = [param.grad for param in params]
        if all([grad is mine for grad, mine in zip(current, self._grads, strict=True)]):
            self._take_back_exposed()
            return False
        fresh = all([grad is None for grad in current])
        if not fresh:
            self._take_back_exposed()
            for index, (grad, mine) in enumerate(zip(current, self._grads, strict=True)):
                if grad is None:
                    self._main_buffer.param_rows(index).zero_()
                elif grad is not mine:
                    assert isinstance(grad, DTensor)
                    self._main_buffer.param_rows(index).copy_(grad.to_local())
        for param, mine in zip(params, self._grads, strict=True):
            param.grad = mine
        return fresh

    def _allocate_main(self) -> None:
        self.main = exposed = self._new_buffer(self._levels[-1], self._precision.grads)
        if self._precision.grads is not self._precision.main:
            self._exposed = exposed = self._new_buffer(self._levels[-1], self._precision.main)
        for index, param in enumerate(self._sharded_params):
            assert isinstance(param, DTensor)
            self._grads.append(
                build_dtensor(exposed.param_rows(index), param.device_mesh, param.placements, tuple(param.shape))
            )

    def _take_back_exposed(self) -> None:
        """Let a change of ``.grad`` (clipping, zeroing) reach main gradients of another dtype."""
        if self._exposed is None or self.main is None:
            return
        for shown, kept in zip(self._exposed.pieces, self.main.pieces, strict=True):
            changed = shown != kept.to(shown.dtype)
            kept.copy_(torch.where(changed, shown.to(kept.dtype), kept))

    def _new_buffer(self, placements: Placements, dtype: torch.dtype) -> DataParallelBuffer:
        return DataParallelBuffer.allocate(self._layout, self._mesh, placements, dtype)

    def _views(self, buffer: DataParallelBuffer) -> list[torch.Tensor]:
        return [buffer.param_rows(index) for index in range(len(self._names))]


def _stage_placements(strategy: Strategy) -> list[Placements]:
    """Placements of gradients before the first stage, between stages, and behind the last."""
    partial = Placement.PARTIAL
    if strategy.outer is None:
        return [Placements(partial, None), Placements(strategy.shard.grads, None)]
    return [
        Placements(partial, partial),
        Placements(strategy.shard.grads, partial),
        Placements(strategy.shard.grads, strategy.outer.grads),
    ]


def _local(grad: torch.Tensor | None, param: nn.Parameter) -> torch.Tensor | None:
    """The local gradient of a parameter that another parallelism holds as a DTensor."""
    if not isinstance(grad, DTensor):
        return grad
    assert isinstance(param, DTensor)
    if grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return grad.to_local()
