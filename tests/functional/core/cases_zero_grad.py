"""Cases: clearing gradients keeps what it must, and the steady state builds and rebinds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import MixedPrecisionPolicy, full_tensor
from megatron_fsdp_v2.memory.allocator import DynamicAllocator
from tests.functional.core.cases_support import (
    STRATEGIES,
    ZERO_3,
    Duel,
    Net,
    Ranks,
    case,
    sgd,
    shard_net,
    squared,
    units_of,
)


@contextmanager
def garbage_in_new_memory() -> Iterator[None]:
    """Transient buffers hold NaN, or a large number, when they get memory."""
    original = DynamicAllocator.allocate

    def allocate(self: Any, key: Any, spec: Any) -> torch.Tensor:
        was_live = self.is_live(key)
        tensor = original(self, key, spec)
        if not was_live:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
        return tensor

    DynamicAllocator.allocate = allocate  # type: ignore[method-assign]
    try:
        yield
    finally:
        DynamicAllocator.allocate = original  # type: ignore[method-assign]


@case(strategies=STRATEGIES)
def r28_clearing_with_an_unused_parameter(ranks: Ranks, strategy: str) -> None:
    """Either way of clearing, over memory full of NaN: an unused parameter gets None or zero, never old data."""
    with garbage_in_new_memory():
        for set_to_none in (True, False):
            duel = Duel(ranks, Net(), shard_net(strategy), optimizer=sgd)
            for step in range(3):
                duel.model.order = duel.reference.order = [0, 2] if step == 1 else [0, 1, 2]
                for _ in range(3):
                    duel.backward()
                duel.compare_gradients()
                unused = duel.model.layers[1].up.weight.grad
                if step == 1:
                    assert unused is None if set_to_none else not full_tensor(unused).any()
                for optimizer in (duel.optimizer, duel.reference_optimizer):
                    optimizer.step()
                before = pointers(duel.model)
                duel.model.zero_grad(set_to_none=set_to_none)
                duel.reference.zero_grad(set_to_none=set_to_none)
                assert_cleared(duel.model, set_to_none, before)
            duel.compare_weights()


def pointers(model: nn.Module) -> dict[str, int]:
    """Addresses of the gradients."""
    return {name: p.grad._local_tensor.data_ptr() for name, p in model.named_parameters() if p.grad is not None}


def assert_cleared(model: nn.Module, set_to_none: bool, before: dict[str, int]) -> None:
    if set_to_none:
        assert all(param.grad is None for param in model.parameters())
        return
    assert pointers(model) == before
    assert not any(param.grad.to_local().any() for param in model.parameters() if param.grad is not None)


@case(strategies=STRATEGIES)
def every_way_to_clear(ranks: Ranks, strategy: str) -> None:
    """By the model and by the optimizer, with None and with zeros, at rest and between forward and backward."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(main_grads_dtype=torch.float64)):
        for clear in ("model", "optimizer"):
            for set_to_none in (True, False):
                for late in (True, False):
                    duel = Duel(ranks, Net(), shard_net(strategy, mp_policy=policy))
                    train_clearing(duel, clear, set_to_none, late)


def train_clearing(duel: Duel, clear: str, set_to_none: bool, late: bool) -> None:
    sides: list[Any] = [duel.model, duel.reference]
    if clear == "optimizer":
        sides = [duel.optimizer, duel.reference_optimizer]
    for _ in range(3):
        data = duel.data()
        losses = [duel.loss(squared, data), duel.reference_loss(squared, data)]
        for side, loss in zip(sides, losses, strict=True):
            if late:
                side.zero_grad(set_to_none=set_to_none)
            loss.backward()
        duel.backward()
        duel.compare_gradients()
        duel.optimizer.step()
        duel.reference_optimizer.step()
        for side in sides:
            if not late:
                side.zero_grad(set_to_none=set_to_none)
    duel.compare_weights()


@case(strategies=STRATEGIES)
def gradients_that_wait(ranks: Ranks, strategy: str) -> None:
    """The model's `zero_grad` drops what waits for its reduction; the optimizer's leaves it to be reduced."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    for step in range(4):
        duel.model.set_requires_gradient_sync(False)
        duel.backward()
        if step % 2:
            duel.model.zero_grad()
            duel.reference.zero_grad()
        else:
            duel.optimizer.zero_grad()
        duel.model.set_requires_gradient_sync(True)
        duel.backward()
        duel.step()
    duel.compare_weights()


@case(strategies=STRATEGIES)
def clearing_one_child(ranks: Ranks, strategy: str) -> None:
    """A child's `zero_grad` and `scale_gradients` leave what others wait with alone."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.model.set_requires_gradient_sync(False)
    duel.backward()
    duel.model.layers[1].zero_grad()
    duel.reference.layers[1].zero_grad()
    duel.model.layers[2].scale_gradients(0.25)
    for param in duel.reference.layers[2].parameters():
        param.grad.mul_(0.25)
    duel.model.finish_grad_sync()
    duel.compare_gradients()


@case(strategies=STRATEGIES)
def gradients_that_users_changed(ranks: Ranks, strategy: str) -> None:
    """A gradient set to None, scaled or replaced between micro-batches counts as it then is."""
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(main_grads_dtype=torch.float64)):
        duel = Duel(ranks, Net(), shard_net(strategy, mp_policy=policy))
        for _ in range(3):
            duel.backward()
            for model in (duel.model, duel.reference):
                model.layers[0].up.weight.grad = None
                model.layers[0].down.weight.grad.mul_(0.5)
                model.layers[1].up.bias.grad = model.layers[1].up.bias.grad * 3
                model.scale.grad = None
            duel.backward()
            duel.step()
        duel.compare_weights()


@case(strategies=STRATEGIES)
def gradients_are_bound_once(ranks: Ranks, strategy: str) -> None:
    """`.grad` is the same object in every micro-batch and step, whichever way it is cleared."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.backward()
    # Held by their ids alone: gradients that somebody keeps are left to them.
    first = gradient_ids(duel.model)
    for clear in (lambda: None, duel.model.zero_grad, lambda: duel.optimizer.zero_grad(set_to_none=False)):
        for _ in range(2):
            duel.backward()
            assert gradient_ids(duel.model) == first
        clear()


def gradient_ids(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(param.grad), id(param.grad._local_tensor)) for name, param in model.named_parameters()}


@case(strategies=STRATEGIES)
def main_gradients_have_memory_only_until_cleared(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))

    def held() -> int:
        stores = [group.gradients.main._store for unit in units_of(duel.model) for group in unit.groups]
        return sum(store.buffer.pieces[0].untyped_storage().nbytes() for store in stores if store.is_live)

    duel.backward()
    assert held() > 0
    duel.model.zero_grad()
    assert held() == 0
    duel.backward()
    assert held() > 0
    duel.optimizer.zero_grad()
    duel.loss(squared, duel.data())
    assert held() == 0, "plain optimizers clear without a word; the next forward notices"


@case(strategies=STRATEGIES)
def gradients_that_somebody_keeps(ranks: Ranks, strategy: str) -> None:
    """They stay what they are when later steps have theirs, whichever tensor of theirs is kept."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    keepers = [lambda grad: grad, lambda grad: grad.to_local(), lambda grad: grad.detach(), lambda grad: grad[:1]]
    for keep in keepers:
        duel.backward()
        kept = keep(duel.model.scale.grad)
        before = kept.clone()
        duel.step()
        duel.backward()
        duel.step()
        assert (kept.to_local() if isinstance(kept, DTensor) else kept).equal(
            before.to_local() if isinstance(before, DTensor) else before
        )
    duel.compare_weights()


@contextmanager
def counted_constructions() -> Iterator[list[str]]:
    """Names of the classes of every DTensor and Parameter made inside."""
    made: list[str] = []
    originals = {cls: cls.__new__ for cls in (DTensor, nn.Parameter)}

    def counting(cls: type) -> Any:
        def new(klass: type, *args: Any, **kwargs: Any) -> Any:
            made.append(cls.__name__)
            return originals[cls](klass, *args, **kwargs)

        return new

    for cls in originals:
        cls.__new__ = counting(cls)  # type: ignore[method-assign]
    try:
        yield made
    finally:
        for cls, original in originals.items():
            cls.__new__ = original  # type: ignore[method-assign]


@case(strategies=STRATEGIES)
def nothing_is_built_after_the_first_step(ranks: Ranks, strategy: str) -> None:
    """No DTensor and no Parameter in forward, backward, synchronisation and clearing."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    with counted_constructions() as made:
        duel.backward()
    assert {"DTensor"} <= set(made), "the count sees nothing"
    duel.optimizer.step()
    for step in range(3):
        with counted_constructions() as made:
            duel.model.zero_grad()
            for _ in range(3):
                duel.loss(squared, duel.data()).backward()
            duel.model.finish_grad_sync()
        assert made == [], f"step {step} made {made}"
        duel.optimizer.step()


@case(worlds=(2, 3))
def reduced_gradients_of_a_skipped_unit_stay(ranks: Ranks) -> None:
    """finish_grad_sync(include_unused=True) gives parameters without a gradient one of zeros, and changes no other."""
    duel = Duel(ranks, Net(), shard_net(ZERO_3), optimizer=sgd)
    duel.model.order = duel.reference.order = [0, 2]
    duel.backward()
    before = full_tensor(duel.model.layers[0].up.weight.grad).clone()
    duel.model.finish_grad_sync()
    assert duel.model.layers[1].up.weight.grad is None
    duel.model.finish_grad_sync(include_unused=True)
    assert not full_tensor(duel.model.layers[1].up.weight.grad).any()
    assert full_tensor(duel.model.layers[0].up.weight.grad).equal(before)
    duel.backward()
    duel.compare_gradients()
