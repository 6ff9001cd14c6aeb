"""Tensors that leave a forward beside its result: auxiliary losses above all.

Their backward reads the unit's weights just as that of the result does, and may begin before it or without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn

# What every module has is no place for results, and is most of what a module has.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLACES = frozenset({torch.Tensor, list, dict})


class SideOutputs:
    """Finds what a forward left in attributes of its modules, and in lists and dicts it was given."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._attributes = [vars(module) for module in modules]
        self._kept: list[weakref.ref[torch.Tensor]] = []
        self._given: list[tuple[list[Any] | dict[Any, Any], list[Any]]] = []

    def note_arguments(self, values: Iterable[Any]) -> None:
        """Remember what is in the lists and dicts among a forward's arguments before it runs."""
        self._given = [(value, list(_items(value))) for value in values if type(value) in (list, dict)]

    def collect(self) -> list[torch.Tensor]:
        """Tensors with a graph that are there since the last call; to be called after each forward."""
        # Nearly always nothing passes this filter, which is all that a usual forward pays for.
        places = [
            value
            for attributes in self._attributes
            for name, value in attributes.items()
            if type(value) in _PLACES and name not in _OF_EVERY_MODULE
        ]
        kept = [tensor for place in places for tensor in _tensors_kept(place)]
        new = [tensor for tensor in kept if not any([known() is tensor for known in self._kept])]
        self._kept = [weakref.ref(tensor) for tensor in kept]
        for container, before in self._given:
            old = {id(item) for item in before}
            new += [item for item in _items(container) if id(item) not in old and _has_graph(item)]
        self._given = []
        return new


def _tensors_kept(place: Any) -> Iterator[torch.Tensor]:
    if isinstance(place, torch.Tensor):
        if _has_graph(place):
            yield place
    elif place:
        # A long list of something else costs a look at what came last.
        last = place[-1] if isinstance(place, list) else place[next(reversed(place))]
        if isinstance(last, torch.Tensor):
            yield from filter(_has_graph, _items(place))


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _has_graph(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None
