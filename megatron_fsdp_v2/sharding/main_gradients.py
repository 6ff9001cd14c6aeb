"""Main gradients of one parameter group: what reductions add up and the optimizer finds as ``.grad``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..memory.allocator import BucketAllocator
from ..offload import Rest
from ..precision import GroupPrecision
from .buffer import DataParallelBuffer, Placements
from .dtensor import build_dtensor
from .layout import GroupLayout
from .mesh import DataParallelMesh
from .transient import TransientBuffer


class MainGradients:
    """The accumulated gradients of a group, with memory from the first reduction of a step until they are cleared.

    Where the optimizer's dtype isn't the accumulation dtype, a second buffer shows them in the optimizer's.
    """

    def __init__(
        self,
        allocator: BucketAllocator,
        layout: GroupLayout,
        mesh: DataParallelMesh,
        placements: Placements,
        precision: GroupPrecision,
        rest: Rest | None,
        sharded_params: Sequence[nn.Parameter],
        label: str,
    ) -> None:
        self._params = sharded_params
        self._precision = precision
        self._new_store = partial(
            TransientBuffer,
            allocator,
            layout,
            mesh,
            placements,
            device=rest.device if rest else None,
            name=f"{label} main gradients",
        )
        self._build()

    def _build(self) -> None:
        precision = self._precision
        self._store = self._new_store(dtype=precision.grads)
        self._shown = None if precision.grads is precision.main else self._new_store(dtype=precision.main)
        self._grads: list[DTensor] = []

    def _build_grads(self) -> None:
        for param, rows in zip(self._params, (self._shown or self._store).views, strict=True):
            assert isinstance(param, DTensor)
            self._grads.append(build_dtensor(rows, param.device_mesh, param.placements, tuple(param.shape)))

    @property
    def buffer(self) -> DataParallelBuffer:
        """The accumulated gradients; only after ``bind``."""
        return self._store.buffer

    @property
    def views(self) -> list[torch.Tensor]:
        """The local rows of every parameter in ``buffer``."""
        return self._store.views

    def live_stores(self) -> list[TransientBuffer]:
        """The buffers that have memory."""
        return [store for store in (self._store, self._shown) if store is not None and store.is_live]

    def bind(self) -> bool:
        """Make ``.grad`` of every parameter show the main gradients; True if nothing is in them to keep.

        A gradient that the user set to None starts from zero; one that the user replaced is taken over.
        """
        current = [param.grad for param in self._params]
        if all([grad is None for grad in current]):
            self._acquire_afresh()
            for param, mine in zip(self._params, self._grads, strict=True):
                param.grad = mine
            return True
        self._take_back_shown()
        if len(self._grads) == len(current) and all(
            [grad is mine for grad, mine in zip(current, self._grads, strict=True)]
        ):
            return False
        self._take_over(current)
        return False

    def _acquire_afresh(self) -> None:
        if self._store.is_live and self._is_held():
            # Somebody kept gradients of an earlier step, which stay what they are.
            self._build()
        self._store.acquire()
        if self._shown is not None:
            self._shown.acquire()
        if not self._grads:
            self._build_grads()
            # Counted here, where no variable of the building is left.
            self._own_references = self._references()

    def _take_over(self, current: Sequence[torch.Tensor | None]) -> None:
        if not self._store.is_live:
            self._acquire_afresh()
            for piece in self._store.buffer.pieces:
                piece.zero_()
        for param, mine, grad, rows in zip(self._params, self._grads, current, self._store.views, strict=True):
            if grad is None:
                rows.zero_()
            elif grad is not mine:
                assert isinstance(grad, DTensor)
                rows.copy_(grad.to_local())
            param.grad = mine

    def _take_back_shown(self) -> None:
        """Let a change of ``.grad`` (clipping, zeroing) reach main gradients of another dtype."""
        if self._shown is None or not self._store.is_live:
            return
        for shown, kept in zip(self._shown.buffer.pieces, self._store.buffer.pieces, strict=True):
            changed = shown != kept.to(shown.dtype)
            kept.copy_(torch.where(changed, shown.to(kept.dtype), kept))

    def show(self) -> None:
        """Make what was accumulated visible where the optimizer's dtype is another."""
        if self._shown is not None:
            torch._foreach_copy_(list(self._shown.buffer.pieces), list(self._store.buffer.pieces))

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply by ``factor``."""
        for store in self.live_stores():
            torch._foreach_mul_(list(store.buffer.pieces), factor)

    def free_if_cleared(self) -> None:
        """Give the memory back if no parameter shows its gradient any more."""
        if not self._store.is_live or any([param.grad is not None for param in self._params]):
            return
        if self._is_held():
            self._build()
            return
        self._store.free()
        if self._shown is not None:
            self._shown.free()

    def _is_held(self) -> bool:
        """Whether somebody else has a gradient tensor of an earlier step, or a view of one."""
        return self._references() != self._own_references

    def _references(self) -> tuple[int, int]:
        storage = (self._shown or self._store).buffer.pieces[0].untyped_storage()
        count = sum(map(sys.getrefcount, self._grads))
        count += sum(map(sys.getrefcount, [grad._local_tensor for grad in self._grads]))
        return count, torch._C._storage_Use_Count(storage._cdata)
