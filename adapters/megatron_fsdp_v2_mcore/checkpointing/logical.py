"""How stock's own checkpoints call the parameters of a model: asked of the model, on stand-ins without data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import nn


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter (or of any state of its shape) and where a `torch_dist` checkpoint has them.

    Attributes:
        name: of the parameter or buffer in the model.
        first: its first row in here. A tensor without dimensions counts as one row.
        rows: how many.
        key: of the tensor in the checkpoint, which may hold many parameters: one per layer, one per expert.
        shape: of that tensor.
        offsets: in it.
        leading: of its dimensions, how many the parameter doesn't have.
        may_be_padded: whether rows at the end may be missing or too many, as those of a vocabulary may.
    """

    name: str
    first: int
    rows: int
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    leading: int
    may_be_padded: bool


def logical_pieces(model: nn.Module, metadata: Mapping[str, Any]) -> list[Piece]:
    """Where stock's `torch_dist` format has every parameter and persistent buffer of a sharded model.

    Args:
        model: the model without wrappers. It is unchanged afterwards.
        metadata: what `sharded_state_dict` takes: `dp_cp_group` and what a checkpoint says of its own layout.

    Raises:
        NotImplementedError: the model keeps a part of a parameter that is no block of rows.
    """
    with _stand_ins(model) as names:
        sharded = model.sharded_state_dict(metadata=dict(metadata))
        return [_piece(tensor, names) for tensor in _sharded_tensors(sharded)]


def _sharded_tensors(state_dict: Any) -> Iterator[ShardedTensor]:
    for value in nested_values(state_dict):
        if isinstance(value, ShardedTensorFactory):
            built = value.build()
            yield from [built] if isinstance(built, ShardedTensor) else _sharded_tensors(built)
        elif isinstance(value, ShardedTensor):
            yield value


def _piece(tensor: ShardedTensor, names: Mapping[int, tuple[str, torch.Tensor]]) -> Piece:
    try:
        name, whole = names[tensor.data.untyped_storage()._cdata]
    except KeyError:
        raise NotImplementedError(f"{tensor.key} is made of no parameter or buffer of the model") from None
    row = math.prod(whole.shape[1:])
    start = tensor.data.storage_offset()
    block = tensor.data.shape[1:] == whole.shape[1:] and tensor.data.is_contiguous() and start % max(row, 1) == 0
    if not block:
        raise NotImplementedError(f"{tensor.key} has a part of {name} that is no block of rows")
    return Piece(
        name=name,
        first=start // max(row, 1),
        rows=tensor.data.shape[0] if tensor.data.ndim else 1,
        key=tensor.key,
        shape=tuple(tensor.global_shape),
        offsets=tuple(tensor.global_offset),
        leading=tensor.prepend_axis_num,
        may_be_padded=tensor.allow_shape_mismatch,
    )


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[dict[int, tuple[str, torch.Tensor]]]:
    """Empty tensors of the whole shapes in place of all parameters and buffers; yields name and tensor by storage."""
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    names: dict[int, tuple[str, torch.Tensor]] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for path, module in model.named_modules():
        for owner in (module._parameters, module._buffers):
            for name, tensor in owner.items():
                if tensor is None:
                    continue
                if tensor not in stand_ins:
                    stand_ins[tensor] = _stand_in(tensor)
                    storage = stand_ins[tensor].untyped_storage()._cdata
                    names[storage] = (f"{path}.{name}" if path else name, stand_ins[tensor])
                replaced.append((owner, name, tensor))
                owner[name] = stand_ins[tensor]
    try:
        yield names
    finally:
        for owner, name, tensor in replaced:
            owner[name] = tensor


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    stand_in = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    # Megatron's marks, such as the dimension that tensor parallelism cuts.
    for name, value in vars(tensor).items():
        if not name.startswith("_"):
            setattr(stand_in, name, value)
    return stand_in
