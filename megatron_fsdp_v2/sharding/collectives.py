"""Collectives over the segments of flat buffers, each one coalesced call where the backend can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

# torch 2.13 renamed these two; both names mean the same collective.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


type Tensors = Sequence[torch.Tensor]
type ReduceOp = dist.ReduceOp.RedOpType

_SENDABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class Work(Protocol):
    """What an asynchronous collective returns."""

    def wait(self) -> Any: ...


def all_gather(outputs: Tensors, inputs: Tensors, group: dist.ProcessGroup) -> Work | None:
    """Gather each 1-D input into its output (``world`` times as long). An input may be its part of the output."""
    pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if o.numel()]
    dtypes = {o.dtype for o, _ in pairs}
    if len(dtypes) > 1 or not dtypes <= _SENDABLE:
        # One coalesced call wants one dtype, and one that the backend knows; bytes always travel.
        pairs = [(o.view(torch.uint8), i.view(torch.uint8)) for o, i in pairs]
    return _coalesced([partial(_all_gather, o, i, group=group, async_op=True) for o, i in pairs], outputs, group)


def reduce_scatter(outputs: Tensors, inputs: Tensors, op: ReduceOp, group: dist.ProcessGroup) -> Work | None:
    """Reduce each 1-D input and keep the rank's part of it in the output."""
    pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if i.numel()]
    calls = [partial(_reduce_scatter, o, i, op=op, group=group, async_op=True) for o, i in pairs]
    return _coalesced(calls, outputs, group)


def all_reduce(tensors: Tensors, op: ReduceOp, group: dist.ProcessGroup) -> Work | None:
    """Reduce each tensor in place."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    return _coalesced([partial(dist.all_reduce, t, op=op, group=group, async_op=True) for t in filled], filled, group)


def _coalesced(calls: Sequence[Callable[[], Any]], tensors: Tensors, group: dist.ProcessGroup) -> Work | None:
    """Issue asynchronous collectives over ``tensors`` as one; None when there's nothing to send."""
    if not calls:
        return None
    if len(calls) == 1:
        work: Work = calls[0]()
        return work
    if tensors[0].device.type == "cpu":
        # gloo's threads note the name of each call they finish in one unlocked string per group. The names of coalesced
        # calls don't fit into its short form, so two that finish at once free the same memory: a rare heap corruption.
        return Several([call() for call in calls])
    with dist.distributed_c10d._coalescing_manager(group=group, async_ops=True) as manager:
        for call in calls:
            call()
    coalesced: Work = manager
    return coalesced


class Several:
    """Collectives that are waited for together."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
