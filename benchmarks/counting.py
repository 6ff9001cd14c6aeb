"""Counts what a training step sends and writes, operation by operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fsdp_v2.sharding import collectives

# By the operator's name in torch's c10d namespace. A coalesced call is one operator, and so counts as one.
_COLLECTIVES = {"allgather": "all-gather", "reduce_scatter": "reduce-scatter", "allreduce": "all-reduce"}
_WRITES_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"}
# FSDP2's copy of its shards into the buffer it gathers from: its schema doesn't say that it writes there.
_UNDECLARED_COPY = "fsdp::all_gather_copy_in"
_SEVERAL = collectives.Several


class StepCounter(TorchDispatchMode):
    """Records the collectives and the bytes written by all other operations while it is entered.

    Attributes:
        calls: collectives by kind. What is coalesced except on gloo counts as one there too.
        payload: bytes by kind: of an all-gather's output, a reduce-scatter's input, an all-reduce's tensor.
        written: bytes by operator, of results that are no views and of arguments it writes in place. Memory that is
            merely allocated isn't counted, nor what happens below the dispatcher, as inside the communication backend.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self._last_kind = ""
        self._several = mock.patch.object(collectives, "Several", self._note_several)

    def __enter__(self) -> Any:
        self._several.start()
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._several.stop()

    def _note_several(self, works: Sequence[collectives.Work]) -> collectives.Work:
        self.calls[self._last_kind] -= len(works) - 1
        return _SEVERAL(works)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Let the DTensor act first; what it does to its local tensors comes by here again.
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        namespace, name = func.name().split("::")[0], func.overloadpacket.__name__
        if namespace == "c10d":
            self._note_collective(name, args)
        elif name not in _WRITES_NOTHING:
            written = sum(_bytes(tensor) for tensor in _written(func, args, kwargs, result))
            if written:
                self.written[f"{namespace}::{name}"] += written
        return result

    def _note_collective(self, name: str, args: tuple[Any, ...]) -> None:
        kind = next((kind for part, kind in _COLLECTIVES.items() if part in name), None)
        if kind is None:
            return
        self.calls[kind] += 1
        self._last_kind = kind
        # Output and input come first; the larger of them is the whole tensor.
        self.payload[kind] += max(sum(_bytes(tensor) for tensor in _tensors(arg)) for arg in args[:2])


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Iterator[torch.Tensor]:
    if func.name() == _UNDECLARED_COPY:
        yield from _tensors(args[0])
        return
    inputs = {storage for arg in (*args, *kwargs.values()) for storage in map(_storage, _tensors(arg))}
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    for tensor in _tensors(result):
        if _storage(tensor) not in inputs:
            yield tensor


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
