"""Tensors are found in, and replaced inside, whatever a forward takes and returns."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from megatron_fsdp_v2.runtime.trees import map_tensors, tensors_in

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    items: list[Any] = field(default_factory=list)


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


A, B, C = (torch.full((1,), float(value)) for value in range(3))


def found(value: Any) -> list[float]:
    return [tensor.item() for tensor in tensors_in(value)]


def test_tensors_are_found_in_order() -> None:
    assert found(A) == [0]
    assert found({"x": A, "y": [B, (C, None)]}) == [0, 1, 2]
    assert found(Pair(A, OrderedDict(b=B))) == [0, 1]
    assert found(Frozen(A, [B, "text", 3])) == [0, 1]
    assert found(Plain(a=A, b=[B, {"c": C}])) == [0, 1, 2]


def test_nothing_is_found_where_nothing_belongs_to_the_result() -> None:
    assert found([None, 1, "text", int, Frozen, found, torch, nn.Linear(1, 1)]) == []


def test_only_one_object_deep_and_never_in_circles() -> None:
    assert found(Plain(inner=Plain(a=A))) == []
    loop = Plain(a=A)
    loop.me = loop  # type: ignore[attr-defined]
    assert found(loop) == [0]


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def test_containers_of_every_kind_are_mapped_as_copies() -> None:
    value = {"list": [A, B], "pair": Pair(B, 3), "frozen": Frozen(C, [B]), "ordered": OrderedDict(c=C)}
    mapped = map_tensors(value, double)
    assert found(mapped) == [0, 2, 2, 4, 2, 4]
    assert found(value) == [0, 1, 1, 2, 1, 2]
    for key, item in value.items():
        assert type(mapped[key]) is type(item)
    assert mapped["pair"].second == 3


def test_unchanged_containers_stay_the_same_object() -> None:
    untouched: list[Any] = [1, "text"]
    value = (A, {"losses": untouched}, None)
    mapped = map_tensors(value, double)
    assert mapped[1] is value[1]
    assert map_tensors(value, lambda tensor: tensor) is value
    assert map_tensors(untouched, double) is untouched
