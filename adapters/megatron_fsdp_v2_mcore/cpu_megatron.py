"""What CPU emulation changes in Megatron's code, as rows of the patch table."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch


def wrap_maybe_move_tensor_to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a tensor that's on the CPU already to NumPy when that's what the caller asked for."""

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return maybe_move_tensor_to_cpu


def wrap_torch_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch's norms serve sequence parallelism: they look at single tokens, so only their marks are missing."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __new__(*args: Any, **kwargs: Any) -> torch.nn.Module:
        call = signature.bind(*args, **kwargs)
        sequence_parallel = call.arguments["config"].sequence_parallel
        call.arguments["config"] = _with(call.arguments["config"], sequence_parallel=False)
        norm: torch.nn.Module = original(*call.args, **call.kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        return norm

    return __new__


def dispatch_dot_product_attention(cls: type) -> None:
    """Makes `cls(...)` build an attention that context parallelism can use where there is any.

    The only one that stock has is transformer-engine's. This one computes the whole attention on every rank: it shows
    what context parallelism does to losses and gradients, and saves neither memory nor time.
    """

    class WholeSequenceAttention(cls):  # type: ignore[misc, valid-type]
        """Gathers queries, keys and values of all context-parallel ranks and keeps this rank's part of the result."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(_with(config, context_parallel_size=1), *args, **kwargs)
            self.config = config

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            group = self.pg_collection.cp
            whole = [_whole_sequence(part, group) for part in (query, key, value)]
            if attention_mask is not None:
                rows = _whole_sequence(attention_mask.transpose(0, 2).to(torch.uint8), group)
                attention_mask = rows.transpose(0, 2).to(attention_mask.dtype)
            result = super().forward(*whole, attention_mask, *args, **kwargs)
            chunks = result.chunk(2 * group.size())
            return torch.cat([chunks[chunk] for chunk in _chunks_of(group.rank(), group.size())])

    def __new__(klass: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = WholeSequenceAttention if klass is cls and config.context_parallel_size > 1 else klass
        return object.__new__(chosen)

    cls.__new__ = __new__  # type: ignore[method-assign, assignment]


def _whole_sequence(part: torch.Tensor, group: Any) -> torch.Tensor:
    """All ranks' tokens (dim 0) in their order. Gradients are summed over the ranks, each of which uses the whole."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    chunks = gather_from_sequence_parallel_region(part.contiguous(), group=group).chunk(2 * group.size())
    places = [chunk for rank in range(group.size()) for chunk in _chunks_of(rank, group.size())]
    return torch.cat([chunks[places.index(place)] for place in range(len(places))])


def _chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Which of `2 * ranks` chunks of a sequence a rank has: early tokens have little to attend to, late ones much."""
    return rank, 2 * ranks - 1 - rank


def _with(config: Any, **changes: Any) -> Any:
    changed = copy.copy(config)
    vars(changed).update(changes)
    return changed
