"""Cases: as many collectives as FSDP2 issues, or fewer, in the order asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from benchmarks.counting import StepCounter
from megatron_fsdp_v2 import fully_shard
from tests.functional.core.cases_support import WIDTH, Block, Net, Ranks, case, sgd, squared
from tests.functional.fsdp2.cases_calls import Separate, in_groups
from tests.functional.fsdp2.trio import Trio, as_one, by_layers

Calls = dict[str, int]


def counted(run: Callable[[], Any]) -> Calls:
    """Collectives by kind that `run` issues."""
    with StepCounter() as counter:
        run()
    return dict(counter.calls)


def calls_of_both(trio: Trio, run: Callable[[Any], Any]) -> tuple[Calls, Calls]:
    """Collectives of our model and of FSDP2's, each in its second pass: the first may build things."""
    for model in trio.both:
        run(model)
    ours, theirs = [counted(partial(run, model)) for model in trio.both]
    return ours, theirs


def one_pass(model: Any) -> None:
    """Forward and backward of one micro-batch."""
    squared(model, torch.ones(2, WIDTH)).backward()


def checkpointed(model: Any, use_reentrant: bool = False) -> None:
    """The same with the activations of every layer recomputed."""
    x = torch.ones(2, WIDTH, requires_grad=True)
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    x.sum().backward()


@case(worlds=(2, 4), usual=(4,))
def as_many_in_every_form_of_resharding(ranks: Ranks) -> None:
    """Three layers and the root: gathers of all before forward, and again before backward of what was freed."""
    gathers = {True: 8, None: 7, False: 4, 2: 8}
    for value in [True, None, False, *([2] if ranks.world == 4 else [])]:
        trio = Trio(ranks, Net(), partial(by_layers, reshard_after_forward=value))
        ours, theirs = calls_of_both(trio, one_pass)
        assert ours == theirs == {"all-gather": gathers[value], "reduce-scatter": 4}, (value, ours, theirs)


@case(worlds=(2, 3))
def evaluation_gathers_once_if_told_so(ranks: Ranks) -> None:
    """And gathers again what was updated; the module shows its DTensors in between."""
    trio = Trio(ranks, Net(), partial(by_layers, reshard_after_forward=False))

    def evaluate(model: Any) -> None:
        with torch.no_grad():
            for _ in range(3):
                squared(model, torch.ones(2, WIDTH))

    for model in trio.both:
        one_pass(model)
        first = counted(partial(evaluate, model))
        assert first == {"all-gather": 4}, (type(model), first)
        assert counted(partial(evaluate, model)) == {}
    ours = trio.both[0]
    assert all(isinstance(param, DTensor) for param in ours.parameters())
    with torch.no_grad():
        ours.layers[1].up.weight.mul_(2)
    assert counted(partial(evaluate, ours)) == {"all-gather": 1}
    ours.set_reshard_after_forward(True)
    # The first forward finds the weights still there.
    assert counted(partial(evaluate, ours)) == {"all-gather": 2 * 4}


@case(worlds=(4,))
def backward_gathers_among_neighbours(ranks: Ranks) -> None:
    """With a group size of two the bytes of backward's gathers are those of two ranks, as with FSDP2."""
    trio = Trio(ranks, Net(), partial(by_layers, reshard_after_forward=2))
    groups = []
    for model in trio.both:
        one_pass(model)
        loss = squared(model, torch.ones(2, WIDTH))
        with group_sizes() as sizes:
            loss.backward()
        groups.append(set(sizes))
    assert groups[0] == groups[1] == {2}, groups


@case(worlds=(2,))
def nothing_is_coalesced_on_gloo(ranks: Ranks) -> None:
    """Coalesced calls that end at once corrupt the heap there."""
    names: set[str] = set()

    class Names(StepCounter):
        def _note_collective(self, name: str, args: tuple[Any, ...]) -> None:
            names.add(name)

    model: Any = fully_shard(Net())
    one_pass(model)
    assert max(len(group.layout.chunks) for group in model._fsdp_unit.groups) > 1
    with Names():
        one_pass(model)
    assert names
    assert not [name for name in names if "coalesced" in name], names


@contextmanager
def group_sizes() -> Iterator[list[int]]:
    """Into how many parts the output of each all-gather falls."""
    sizes: list[int] = []

    class Sizes(StepCounter):
        def _note_collective(self, name: str, args: tuple[Any, ...]) -> None:
            if "allgather" in name:
                # One tensor or a list of them, as output and as input.
                output, input_ = [sum(tensor.numel() for tensor in tensors_of(arg)) for arg in args[:2]]
                sizes.append(output // input_)

    with Sizes():
        yield sizes


def tensors_of(value: Any) -> Sequence[torch.Tensor]:
    """A tensor, or those of a list, as a list."""
    return [value] if isinstance(value, torch.Tensor) else value


@case(worlds=(2,))
def one_unit_and_one_gather(ranks: Ranks) -> None:
    ours, theirs = calls_of_both(Trio(ranks, Net(), as_one), one_pass)
    assert ours == theirs == {"all-gather": 1, "reduce-scatter": 1}


@case(worlds=(2,))
def one_gather_for_grouped_modules(ranks: Ranks) -> None:
    """Norm and head as one unit, both layers as another: two gathers in forward and two in backward."""
    ours, theirs = calls_of_both(Trio(ranks, Separate(), in_groups), one_pass)
    assert ours == theirs == {"all-gather": 4, "reduce-scatter": 2}, (ours, theirs)


@case(worlds=(2,))
def none_for_gradients_that_are_put_off(ranks: Ranks) -> None:
    """And none at all for a second micro-batch whose weights were kept."""
    trio = Trio(ranks, Net())
    for model in trio.both:
        model.set_requires_gradient_sync(False)
    ours, theirs = calls_of_both(trio, one_pass)
    assert ours == theirs == {"all-gather": 7}
    for model in trio.both:
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
    ours, theirs = calls_of_both(trio, one_pass)
    assert ours == theirs == {}


@case(worlds=(2,))
def no_gather_for_a_backward_without_weights(ranks: Ranks) -> None:
    """`set_unshard_in_backward(False)` of a unit whose backward needs none, such as an embedding's."""

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Embedding(7, WIDTH), Block()])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.layers[1](self.layers[0](tokens))

    tokens = torch.arange(6).expand(ranks.world, 6)
    trio = Trio(ranks, Embedded(), inputs=lambda: tokens, optimizer=sgd)
    run: Callable[[Any], None] = lambda model: squared(model, tokens[0]).backward()  # noqa: E731
    ours, theirs = calls_of_both(trio, run)
    assert ours == theirs == {"all-gather": 4, "reduce-scatter": 2}, (ours, theirs)
    for model in trio.both:
        model.layers[0].set_unshard_in_backward(False)
    ours, theirs = calls_of_both(trio, run)
    assert ours == theirs == {"all-gather": 3, "reduce-scatter": 2}, (ours, theirs)
    for model in trio.both:
        model.zero_grad()
    trio.train(steps=2)


@case(worlds=(2,))
def as_many_with_recomputation(ranks: Ranks) -> None:
    for use_reentrant in (False, True):
        trio = Trio(ranks, Net())
        for model in trio.both:
            one_pass(model)
        ours, theirs = calls_of_both(trio, partial(checkpointed, use_reentrant=use_reentrant))
        assert ours == {"all-gather": 6, "reduce-scatter": 3}, (use_reentrant, ours)
        # FSDP2 gathers one unit more where the re-entrant kind hides the end of the backward.
        assert theirs == ours | {"all-gather": 7 if use_reentrant else 6}, (use_reentrant, theirs)


@case(worlds=(4,))
def two_axes(ranks: Ranks) -> None:
    """HSDP adds one all-reduce per unit, unless it is put off."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    trio = Trio(ranks, Net(), partial(by_layers, mesh=mesh))
    ours, theirs = calls_of_both(trio, one_pass)
    assert ours == theirs == {"all-gather": 7, "reduce-scatter": 4, "all-reduce": 4}
    for model in trio.both:
        model.set_requires_all_reduce(False)
    ours, theirs = calls_of_both(trio, one_pass)
    assert ours == theirs == {"all-gather": 7, "reduce-scatter": 4}


class Stack(nn.Module):
    """Linear layers of different numbers of rows, which a gather can be told by. Rows divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4 * (index + 1), bias=False) for index in range(4)])
        self.head = nn.Linear(4, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[..., :4].tanh()
        return self.head(x)


class Trace(StepCounter):
    """Events of a pass: which layer is gathered, by the size of its weight, and which one computes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.events: list[str] = []
        self._names = {4 * 4 * (index + 1): f"layer {index}" for index in range(4)} | {4 * 32: "head"}
        for index, layer in enumerate(model.layers):
            layer.forward = partial(self._compute, index, layer.forward)

    def _compute(self, index: int, forward: Any, x: torch.Tensor) -> torch.Tensor:
        self.events.append(f"compute {index}")
        return forward(x)

    def _note_collective(self, name: str, args: tuple[Any, ...]) -> None:
        if "allgather" in name:
            numel = sum(tensor.numel() for tensor in tensors_of(args[0]))
            self.events.append(f"gather {self._names[numel]}")


@case(worlds=(2, 4), usual=(2,))
def prefetch_lists_order_the_gathers(ranks: Ranks) -> None:
    """Two units ahead in forward and in backward: the same gathers before the same computations as with FSDP2."""
    trio = Trio(ranks, Stack(), optimizer=sgd, inputs=lambda: torch.randn(ranks.world, 3, 4))
    forwards, backwards = [], []
    for model in trio.both:
        layers = list(model.layers)
        model.set_modules_to_forward_prefetch(layers[:1])
        for index, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
            layer.set_modules_to_backward_prefetch(layers[max(index - 2, 0) : index][::-1])
        model.set_modules_to_backward_prefetch(layers[:1:-1])
        squared(model, torch.ones(3, 4)).backward()
        with Trace(model) as trace:
            loss = squared(model, torch.ones(3, 4))
            forwards.append(list(trace.events))
            loss.backward()
            backwards.append(trace.events[len(forwards[-1]) :])
        model.zero_grad()
    gathers = [f"gather layer {index}" for index in range(4)]
    computes = [f"compute {index}" for index in range(4)]
    ahead = ["gather head", *gathers[:3], computes[0], gathers[3], *computes[1:]]
    assert forwards == [ahead, ahead], forwards
    assert backwards == [gathers[::-1]] * 2, backwards
    trio.train(steps=2)
