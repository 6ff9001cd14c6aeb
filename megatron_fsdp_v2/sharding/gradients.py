"""Gradients of one parameter group, from autograd to the optimizer.

Gradients pass *stages*, one per data-parallel axis; each stage reduces along its axis. Before every stage stands an
accumulator that has memory only while reduction along the axis is put off. Behind the last stage stand the main
gradients. All buffers are made once; what comes and goes is their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..memory.allocator import REDUCE_SCATTER, BucketAllocator
from ..offload import Rest
from ..precision import GroupPrecision
from ..strategy import AxisStrategy, Placement, Strategy
from .buffer import DataParallelBuffer, Placements, redistribute
from .collectives import Work
from .layout import GroupLayout
from .main_gradients import MainGradients
from .mesh import DataParallelMesh
from .transient import TransientBuffer


class GroupGradients:
    """Collects, accumulates, reduces and exposes the gradients of a group.

    ``collect`` takes what autograd left on the unsharded parameters; the iterator of ``reduce`` then runs stages and
    yields each collective for the caller to wait on; ``release`` gives back the transient memory.

    ``levels`` are the placements before the first stage, between stages, and behind the last.
    """

    def __init__(
        self,
        layout: GroupLayout,
        mesh: DataParallelMesh,
        strategy: Strategy,
        precision: GroupPrecision,
        rest: Rest | None,
        sharded_params: Sequence[nn.Parameter],
    ) -> None:
        self._layout = layout
        self._mesh = mesh
        self._precision = precision
        self._rest = rest
        self._sharded_params = sharded_params
        axes: list[AxisStrategy] = [strategy.shard, *([strategy.outer] if strategy.outer else [])]
        self._deferred = [axis.deferred for axis in axes]
        self.levels = _stage_placements(strategy)
        # Into untouched main gradients of the same dtype and device a reduction can write by itself; into those of full
        # size new gradients can be written before it.
        self._reaches_main = precision.comm is precision.grads and rest is None
        self._fits_main = self._reaches_main and all([Placement.SHARDED not in level for level in self.levels])
        self._average = True
        self._divisor = 1.0
        self._sums_only = False
        self._op = dist.ReduceOp.AVG
        self._scale = 1.0
        self._hook: Callable[[torch.Tensor], None] | None = None
        self._unsharded_params: Sequence[nn.Parameter] = ()
        self._sent: list[TransientBuffer] = []
        self._pending: list[TransientBuffer] = []
        self._main: MainGradients | None = None
        self._waits = [False] * self.stages
        self._source: DataParallelBuffer | None = None
        # Whether main gradients were found untouched, where that had to be known before the last stage.
        self._fresh: bool | None = None
        self._to_expose = False

    def prepare(self, allocator: BucketAllocator, unsharded_params: Sequence[nn.Parameter], label: str) -> None:
        """Build the buffers gradients pass through; ``label`` names the group."""

        def transient(level: int, dtype: torch.dtype, role: str, arena: str | None = None) -> TransientBuffer:
            name = f"{label} {role}" + (f" behind stage {level}" if level else "")
            return TransientBuffer(
                allocator, self._layout, self._mesh, self.levels[level], dtype, arena=arena, name=name
            )

        self._unsharded_params = unsharded_params
        self._has_inner = any([isinstance(param, DTensor) for param in unsharded_params])
        # What is sent: before the first stage the gradients whole, behind each stage its result.
        comm, grads = self._precision.comm, self._precision.grads
        self._sent = [transient(level, comm, "gradients", REDUCE_SCATTER) for level in range(self.stages + 1)]
        # These live from one micro-batch to another, so they share memory with nothing.
        self._pending = [transient(level, grads, "waiting gradients") for level in range(self.stages)]
        self._main = MainGradients(
            allocator,
            self._layout,
            self._mesh,
            self.levels[-1],
            self._precision,
            self._rest,
            self._sharded_params,
            label,
        )
        self._recast: dict[tuple[int, int], DataParallelBuffer] = {}

    @property
    def main(self) -> MainGradients:
        """What reductions add up; only after ``prepare``."""
        assert self._main is not None
        return self._main

    @property
    def stages(self) -> int:
        return len(self._deferred)

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
        return any(self._waits[:stages])

    @property
    def is_exposed(self) -> bool:
        """Whether the optimizer finds reduced gradients on the sharded parameters."""
        return self._sharded_params[0].grad is not None

    def set_reduction(self, average: bool, divisor: float) -> None:
        """Reduce to the average or the sum over all data-parallel ranks, divided by ``divisor``."""
        self._average, self._divisor = average, divisor
        self._choose_operation()

    def set_sums_only(self, sums_only: bool) -> None:
        """Whether averages are made of a sum and a division, for communication that can't average."""
        self._sums_only = sums_only
        self._choose_operation()

    def set_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        """Call ``hook`` on every flat piece of newly reduced gradients, which it may change in place."""
        self._hook = hook

    def _choose_operation(self) -> None:
        averages = self._average and not self._sums_only
        self._op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        ranks = self._mesh.size if self._average and self._sums_only else 1
        self._scale = 1.0 / (self._divisor * ranks)

    def has_new(self) -> bool:
        """Whether autograd produced gradients that were not collected yet."""
        return any([param.grad is not None for param in self._unsharded_params])

    def collect(self, stages: int, force: bool = False) -> bool:
        """Take new gradients in, and tell whether ``reduce(stages)`` has anything to do.

        Parameters without a gradient count as zero, since other ranks may have one for them. With ``force`` that holds
        even when no parameter has one.
        """
        self._fresh = None
        new = self._take_new()
        if stages == 0 or self._waits[0]:
            if new:
                self._add_to_first(new)
            self._source = self._take_pending(0) if stages else None
            return stages > 0
        if not new and not force:
            self._source = None
            return self.is_waiting_before(stages)
        if self._fits_main and stages == self.stages and not self.has_pending:
            self._fresh = self.main.bind()
        if self._fresh:
            self._source = self._as(self.main.buffer, 0)
            _write(self.main.views, new)
        else:
            self._source = self._sent[0].acquire()
            _write(self._sent[0].views, new)
        return True

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
            fresh = last and (self.main.bind() if self._fresh is None else self._fresh)
            direct = fresh and self._reaches_main
            target = self.main.buffer if direct else self._target_of(stage, source)
            work = redistribute(source, target, self._op)
            if work is not None:
                yield work
            if last:
                self._finish(target, fresh, direct)
            else:
                source = self._merge_pending(stage + 1, target, keep=stage + 1 == stages)
        self._source = None

    def _finish(self, reduced: DataParallelBuffer, fresh: bool, direct: bool) -> None:
        self._fresh = None
        self._to_expose = True
        if self._hook is not None:
            for piece in reduced.pieces:
                self._hook(piece)
        if not direct:
            pieces = list(reduced.pieces)
            if not fresh and self._rest is not None:
                pieces = [piece.to(self._rest.device) for piece in pieces]
            operation = torch._foreach_copy_ if fresh else torch._foreach_add_
            operation(list(self.main.buffer.pieces), pieces)

    def release(self) -> None:
        """Give back the memory of what was reduced; call once no reduction can read it any more."""
        for store in self._sent:
            store.free()
        for store, waits in zip(self._pending, self._waits, strict=True):
            if not waits:
                store.free()

    def expose(self) -> bool:
        """Make the main gradients visible as ``.grad`` where the optimizer's dtype isn't the accumulation dtype.

        True if something was reduced into them since the last call.
        """
        reduced, self._to_expose = self._to_expose, False
        if reduced:
            self.main.show()
        return reduced

    def call_hooks(self) -> None:
        """Call what users registered with ``register_post_accumulate_grad_hook`` on the sharded parameters."""
        for param in self._sharded_params:
            hooks = getattr(param, "_post_accumulate_grad_hooks", None)
            for hook in list(hooks.values()) if hooks else ():
                hook(param)

    def free_if_cleared(self) -> None:
        """Give the memory of main gradients back if ``.grad`` of no parameter shows them any more."""
        if self._main is not None:
            self._main.free_if_cleared()

    @torch.no_grad()
    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply main and pending gradients."""
        if self._main is not None:
            self._main.scale(factor)
        for store, waits in zip(self._pending, self._waits, strict=False):
            if waits:
                torch._foreach_mul_(list(store.buffer.pieces), factor)

    def resting_storages(self) -> Iterator[torch.UntypedStorage]:
        """Memory of the device in which gradients are between passes: reduced ones, and those that wait."""
        waiting = [store for store, waits in zip(self._pending, self._waits, strict=True) if waits]
        for store in [*(self.main.live_stores() if self._rest is None else []), *waiting]:
            yield store.buffer.pieces[0].untyped_storage()

    def drop_pending(self) -> None:
        """Forget gradients whose reduction was put off, and new ones."""
        self._waits = [False] * self.stages
        for store in self._pending:
            store.free()
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
        if self._has_inner:
            return [_local(grad, param) for grad, param in zip(grads, self._unsharded_params, strict=True)]
        return grads

    def _add_to_first(self, grads: Sequence[torch.Tensor | None]) -> None:
        store = self._pending[0]
        if not self._waits[0]:
            self._waits[0] = True
            store.acquire()
            _write(store.views, grads)
            return
        pairs = [(view, grad) for view, grad in zip(store.views, grads, strict=True) if grad is not None]
        torch._foreach_add_([view for view, _ in pairs], [grad for _, grad in pairs])

    def _take_pending(self, level: int) -> DataParallelBuffer | None:
        """What waits before a stage, in the dtype it is sent in; it waits no longer."""
        if not self._waits[level]:
            return None
        self._waits[level] = False
        store = self._pending[level]
        if self._precision.comm is self._precision.grads:
            return store.buffer
        sent = self._sent[level].acquire()
        torch._foreach_copy_(list(sent.pieces), list(store.buffer.pieces))
        return sent

    def _merge_pending(self, level: int, reduced: DataParallelBuffer, keep: bool) -> DataParallelBuffer | None:
        """Add a stage's result to what waits for the next stage; ``keep`` leaves the sum waiting."""
        waits = self._waits[level]
        if not waits and not keep:
            return reduced
        operation = torch._foreach_add_ if waits else torch._foreach_copy_
        operation(list(self._pending[level].acquire().pieces), list(reduced.pieces))
        self._waits[level] = True
        return None if keep else self._take_pending(level)

    def _target_of(self, stage: int, source: DataParallelBuffer) -> DataParallelBuffer:
        if self.levels[stage + 1][stage] is Placement.REPLICATED:
            return self._as(source, stage + 1)
        return self._sent[stage + 1].acquire()

    def _as(self, buffer: DataParallelBuffer, level: int) -> DataParallelBuffer:
        """The same memory under the placements of another level, which leave its size as it is."""
        key = (id(buffer.pieces[0]), level)
        known = self._recast.get(key)
        if known is None or known.pieces is not buffer.pieces:
            known = self._recast[key] = DataParallelBuffer(self._layout, self._mesh, self.levels[level], buffer.pieces)
        return known


def _write(views: list[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
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
