"""Cases: when gradients are reduced, and what becomes of those that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp_v2 import full_tensor, fully_shard
from megatron_fsdp_v2.sharding import buffer
from tests.functional.core.cases_support import STRATEGIES, WIDTH, Duel, Net, Ranks, case, sgd, shard_net, squared

TWO_AXES = tuple(f"{strategy}+{outer}" for strategy in STRATEGIES for outer in ("no_shard", "optim"))[:-1]
KEEPS_WHOLE_GRADIENTS = ("optim", "no_shard")


@cache
def square_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))


def options_of(names: str) -> dict[str, Any]:
    """Arguments of fully_shard for ``strategy``, or for ``strategy+outer_strategy`` on 2 x 2."""
    strategy, _, outer = names.partition("+")
    return {"strategy": strategy, "mesh": square_mesh(), "outer_strategy": outer} if outer else {"strategy": strategy}


def plain(model: Any) -> AbstractContextManager[None]:
    return nullcontext()


def no_sync(model: Any) -> AbstractContextManager[None]:
    result: AbstractContextManager[None] = model.no_sync()
    return result


@contextmanager
def no_gradient_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


@contextmanager
def no_all_reduce(model: Any) -> Iterator[None]:
    model.set_requires_all_reduce(False)
    yield
    model.set_requires_all_reduce(True)


@contextmanager
def counted_reductions() -> Iterator[list[str]]:
    """Names of the reductions issued inside, one per call."""
    seen: list[str] = []
    originals = {name: getattr(buffer, name) for name in ("reduce_scatter", "all_reduce")}

    def counted(name: str) -> Any:
        def call(*args: Any) -> Any:
            seen.append(name)
            return originals[name](*args)

        return call

    for name in originals:
        setattr(buffer, name, counted(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(buffer, name, original)


Marking = Callable[[Any], AbstractContextManager[None]]


def reductions(names: str, markings: tuple[Marking, ...]) -> list[int]:
    """Reductions of a model of one unit in each micro-batch, and in the ``finish_grad_sync`` behind them."""
    model = fully_shard(nn.Linear(WIDTH, 3), **options_of(names))
    counts = []
    with counted_reductions() as seen:
        for marking in markings:
            before = len(seen)
            with marking(model):
                squared(model, torch.randn(2, WIDTH)).backward()
            counts.append(len(seen) - before)
        before = len(seen)
        model.finish_grad_sync()
    return [*counts, len(seen) - before]


@case(worlds=(2,), strategies=STRATEGIES)
def reductions_along_one_axis(ranks: Ranks, strategy: str) -> None:
    waits = strategy in KEEPS_WHOLE_GRADIENTS
    assert reductions(strategy, (plain, plain)) == [1, 1, 0]
    assert reductions(strategy, (no_sync, no_sync, plain)) == ([0, 0, 1, 0] if waits else [1, 1, 1, 0])
    assert reductions(strategy, (no_sync, no_sync)) == ([0, 0, 1] if waits else [1, 1, 0])
    assert reductions(strategy, (no_gradient_sync, no_gradient_sync, plain)) == [0, 0, 1, 0]
    assert reductions(strategy, (no_gradient_sync, no_gradient_sync)) == [0, 0, 1]
    assert reductions(strategy, (no_all_reduce, plain)) == [1, 1, 0]
    assert reductions(strategy, ()) == [0]


@case(worlds=(4,), strategies=TWO_AXES)
def reductions_along_two_axes(ranks: Ranks, names: str) -> None:
    waits = names.partition("+")[0] in KEEPS_WHOLE_GRADIENTS
    assert reductions(names, (plain, plain)) == [2, 2, 0]
    assert reductions(names, (no_sync, no_sync, plain)) == ([0, 0, 2, 0] if waits else [1, 1, 2, 0])
    assert reductions(names, (no_sync, no_sync)) == ([0, 0, 2] if waits else [1, 1, 1])
    assert reductions(names, (no_gradient_sync, plain)) == [0, 2, 0]
    assert reductions(names, (no_all_reduce, no_all_reduce, plain)) == [1, 1, 2, 0]
    assert reductions(names, (no_all_reduce, no_all_reduce)) == [1, 1, 1]
    assert reductions(names, (no_all_reduce, no_gradient_sync, no_sync)) == ([1, 0, 0, 2] if waits else [1, 0, 1, 1])


MIXTURES: tuple[tuple[Marking, ...], ...] = (
    (no_gradient_sync, plain, no_sync, no_gradient_sync),
    (no_sync, no_gradient_sync, no_all_reduce, plain),
    (plain, no_sync),
    (no_all_reduce, no_gradient_sync, no_sync, no_all_reduce),
    (no_all_reduce, plain, no_gradient_sync, plain),
)


def _mixed_markings(ranks: Ranks, names: str) -> None:
    """However micro-batches of one step are marked, the step sees the gradients of all of them."""
    duel = Duel(ranks, Net(2), shard_net(**options_of(names)), optimizer=sgd)
    for markings in MIXTURES:
        for marking in markings:
            with marking(duel.model):
                duel.backward()
        duel.model.finish_grad_sync()
        duel.step()
    duel.compare_weights()


@case(worlds=(2, 3), strategies=STRATEGIES)
def mixed_markings(ranks: Ranks, strategy: str) -> None:
    _mixed_markings(ranks, strategy)


@case(worlds=(4,), strategies=TWO_AXES)
def mixed_markings_on_two_axes(ranks: Ranks, names: str) -> None:
    _mixed_markings(ranks, names)


class Gain(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 2))

    def forward(self, gradient: float) -> torch.Tensor:
        return (self.weight * gradient).sum()


def _gradient(model: Any) -> set[float]:
    return set(full_tensor(model.weight.grad).flatten().tolist())


def _put_off(names: str, marking: Marking) -> Any:
    """A model whose gradient of 1 waits, wholly or in part, for its reduction."""
    model = fully_shard(Gain(), **options_of(names))
    with marking(model):
        model(1.0).backward()
    return model


def _waiting_gradients(names: str) -> None:
    for marking in (no_sync, no_gradient_sync, no_all_reduce):
        model = _put_off(names, marking)
        model.scale_gradients(torch.tensor(0.5))
        model(2.0).backward()
        assert _gradient(model) == {2.5}, "a scale reaches what waits, and nothing else"

        model = _put_off(names, marking)
        waits = model.weight.grad is None
        model.zero_grad()
        model(2.0).backward()
        assert _gradient(model) == {2.0}, "the module's zero_grad drops what waits"

        model = _put_off(names, marking)
        torch.optim.SGD(model.parameters(), lr=1.0).zero_grad()
        model(2.0).backward()
        assert _gradient(model) == {3.0 if waits else 2.0}, "an optimizer knows only what it can see"


@case(worlds=(2,), strategies=STRATEGIES)
def waiting_gradients(ranks: Ranks, strategy: str) -> None:
    _waiting_gradients(strategy)


@case(worlds=(4,), strategies=TWO_AXES)
def waiting_gradients_on_two_axes(ranks: Ranks, names: str) -> None:
    _waiting_gradients(names)


@case(worlds=(2,), strategies=STRATEGIES)
def zeros_for_the_unused_when_asked_for(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(3), shard_net(strategy), optimizer=sgd)
    for model in (duel.model, duel.reference):
        model.order = [0, 2]
    duel.backward()
    skipped = [param for name, param in duel.model.named_parameters() if name.startswith("layers.1.")]
    assert all(param.grad is None for param in skipped)
    duel.model.finish_grad_sync(include_unused=True)
    assert all(param.grad is not None and not full_tensor(param.grad).any() for param in skipped)
    duel.step()
    duel.compare_weights()
