"""Tensors inside the arguments and results of a forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn as nn


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in dicts, lists, tuples, dataclasses and the attributes of any other object, in order."""
    return _tensors_in(value, inside_object=False)


def _tensors_in(value: Any, inside_object: bool) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, spec.name) for spec in fields(value)]
    elif not inside_object and hasattr(value, "__dict__") and not isinstance(value, _NO_RESULTS):
        # One level only: what an object's attributes lead to may be anything.
        inside_object, items = True, vars(value).values()
    for item in items:
        yield from _tensors_in(item, inside_object)


_NO_RESULTS = (type, nn.Module, FunctionType, ModuleType)


def map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace tensors in dicts, lists, tuples and dataclasses.

    Containers are copied if something in them is replaced, and otherwise stay the same object: a module may have been
    given one to write into.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        old: list[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)):
        old = list(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        old = [(spec.name, getattr(value, spec.name)) for spec in fields(value)]
    else:
        return value
    new = {key: mapped for key, item in old if (mapped := map_tensors(item, fn)) is not item}
    return _with(value, new) if new else value


def _with(value: Any, new: dict[Any, Any]) -> Any:
    """A copy of a container with some items replaced."""
    if isinstance(value, tuple):
        items = [new.get(index, item) for index, item in enumerate(value)]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    result = copy.copy(value)
    for key, item in new.items():
        if isinstance(value, (dict, list)):
            result[key] = item
        else:
            # Frozen dataclasses too.
            object.__setattr__(result, key, item)
    return result
