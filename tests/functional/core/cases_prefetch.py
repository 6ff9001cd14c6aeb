"""Cases: one unit is gathered ahead of compute, in the order that really ran, and never more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from tests.functional.core.cases_support import (
    STRATEGIES,
    WIDTH,
    ZERO_3,
    Block,
    Duel,
    Net,
    Ranks,
    assert_at_rest,
    case,
    gathered,
    sgd,
    shard_net,
    squared,
    units_of,
)

EVERYTHING = ("layers.0", "layers.1", "layers.2", "layers.3")


class _MarkBackward(torch.autograd.Function):
    """Reports when the backward of what was computed from its result begins to end."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, report: Any) -> torch.Tensor:
        ctx.report = report
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.report()
        return grad, None


class Traced(Block):
    """A block that reports when its forward computes and when its backward has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.name = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append(f"compute {self.name}")
        inner = super().forward(x)
        return _MarkBackward.apply(inner, partial(self.events.append, f"backward {self.name}"))


class Trace:
    """A net of four units below its root, and the order of gathers, computations and frees in it."""

    def __init__(self, ranks: Ranks, strategy: str = ZERO_3) -> None:
        net = Net(4)
        net.layers = nn.ModuleList([Traced() for _ in range(4)])
        self.duel = Duel(ranks, net, shard_net(strategy), optimizer=sgd)
        self.net = self.duel.model
        self.events: list[str] = []
        self.most_gathered = 0
        self.net.lazy_init()
        for unit in units_of(self.net):
            for group in unit.groups:
                group.start_gather = partial(self._gather, unit, group.start_gather)
                group.release = partial(self._release, unit, group, group.release)
        for index, layer in enumerate(self.net.layers):
            layer.name, layer.events = f"layers.{index}", self.events

    def _gather(self, unit: Any, start: Any, version: int) -> Any:
        transfer = start(version)
        if transfer is not None:
            self.events.append(f"gather {unit.name}")
            below_root = [name for name in gathered(self.net) if name != "Net"]
            self.most_gathered = max(self.most_gathered, len(below_root))
        return transfer

    def _release(self, unit: Any, group: Any, release: Any) -> None:
        if group.gathers_per_use and group.is_gathered(group.main_version()):
            self.events.append(f"free {unit.name}")
        release()

    def forward(self, order: Any = (0, 1, 2, 3), seed: int = 0) -> tuple[list[str], torch.Tensor]:
        """Events of a forward of the layers `order`, and its loss."""
        self.net.order = self.duel.reference.order = list(order)
        with self._recorded() as events:
            torch.manual_seed(seed)
            self.data = self.duel.data()
            loss = self.duel.loss(squared, self.data)
        return events, loss

    def backward(self, loss: torch.Tensor) -> list[str]:
        """Events of the backward; the reference follows."""
        with self._recorded() as events:
            loss.backward()
        self.duel.reference_loss(squared, self.data).backward()
        assert_at_rest(self.net)
        return events

    def run(self, order: Any = (0, 1, 2, 3)) -> tuple[list[str], list[str]]:
        """Events of a forward and of its backward."""
        events, loss = self.forward(order)
        return events, self.backward(loss)

    @contextmanager
    def _recorded(self) -> Iterator[list[str]]:
        self.events.clear()
        seen: list[str] = []
        yield seen
        seen += [event for event in self.events if not event.endswith("Net")]


def expected_forward(order: list[int]) -> list[str]:
    """Each unit's gather is issued before the unit ahead of it computes; each is freed after its own computation."""
    events = [f"gather layers.{order[0]}"]
    for index, following in zip(order, [*order[1:], None], strict=True):
        events += [f"gather layers.{following}"] if following is not None else []
        events += [f"compute layers.{index}", f"free layers.{index}"]
    return events


def expected_backward(order: list[int]) -> list[str]:
    """The same from the other end."""
    return [event.replace("compute", "backward") for event in expected_forward(order[::-1])]


@case()
def one_unit_ahead(ranks: Ranks) -> None:
    """The second pass is in the recorded order; even the first backward follows its forward's order reversed."""
    trace = Trace(ranks)
    first_forward, first_backward = trace.run()
    alone = [(f"gather {name}", f"compute {name}", f"free {name}") for name in EVERYTHING]
    assert first_forward == [event for events in alone for event in events]
    assert first_backward == expected_backward([0, 1, 2, 3])
    for _ in range(2):
        forward, backward = trace.run()
        assert forward == expected_forward([0, 1, 2, 3])
        assert backward == expected_backward([0, 1, 2, 3])
        trace.duel.step()
    assert trace.most_gathered == 2
    trace.duel.compare_weights()


@case()
def recovery_from_a_wrong_prediction(ranks: Ranks) -> None:
    """A unit that was gathered ahead and left out is freed at once; the next pass has the new order."""
    trace = Trace(ranks)
    trace.run()
    trace.run()
    for order in ([0, 2, 3], [3, 1], [0, 1, 2, 3], [2, 2, 0]):
        surprised, _ = trace.run(order)
        assert [event for event in surprised if "compute" in event] == [f"compute layers.{index}" for index in order]
        assert trace.most_gathered <= 2
        settled_forward, settled_backward = trace.run(order)
        if len(set(order)) == len(order):
            assert settled_forward == expected_forward(order)
            assert settled_backward == expected_backward(order)
        trace.duel.step()
    trace.duel.compare_weights()


@case(worlds=(2, 3))
def what_was_gathered_for_nothing_is_freed(ranks: Ranks) -> None:
    """The skipped unit's memory goes back when the next unit runs, not at the end of the pass."""
    trace = Trace(ranks)
    trace.run()
    trace.run()
    events, loss = trace.forward([0, 2, 3])
    assert events.index("free layers.1") < events.index("compute layers.2")
    assert gathered(trace.net) == ["Net"]
    trace.backward(loss)
    events, _ = trace.forward([0, 2])
    assert gathered(trace.net) == ["Net"], "a unit gathered ahead outlived the forward"


@case(worlds=(2, 3))
def evaluation_and_children_alone_leave_predictions_alone(ranks: Ranks) -> None:
    trace = Trace(ranks)
    trace.run()
    trace.run()
    with torch.no_grad():
        assert trace.forward()[0] == expected_forward([0, 1, 2, 3])
        assert gathered(trace.net) == []
        trace.net.layers[2](torch.randn(2, WIDTH))
        assert gathered(trace.net) == []
    forward, backward = trace.run()
    assert forward == expected_forward([0, 1, 2, 3])
    assert backward == expected_backward([0, 1, 2, 3])
    trace.net.layers[2](torch.randn(2, WIDTH)).sum().backward()
    trace.duel.optimizer.zero_grad()
    trace.duel.reference.zero_grad()
    forward, backward = trace.run()
    assert forward == expected_forward([0, 1, 2, 3])
    assert trace.run()[1] == expected_backward([0, 1, 2, 3])
    assert trace.most_gathered == 2


@case(worlds=(2, 3))
def several_forwards_before_their_backwards(ranks: Ranks) -> None:
    trace = Trace(ranks)
    trace.run()
    for _ in range(3):
        losses = [trace.forward()[1], trace.forward()[1]]
        for loss in reversed(losses):
            assert trace.backward(loss) == expected_backward([0, 1, 2, 3])
        trace.duel.step()
    assert trace.most_gathered == 2
    trace.duel.compare_weights()


@case(strategies=STRATEGIES)
def collectives_of_one_step(ranks: Ranks, strategy: str) -> None:
    """Gathers: two per unit and one for the root with ZeRO-3, none after the first micro-batch otherwise."""
    trace = Trace(ranks, strategy)
    trace.run()
    trace.duel.step()
    forward, backward = trace.run()
    gathers = [sum("gather" in event for event in events) for events in (forward, backward)]
    expected = {ZERO_3: [4, 4], "optim_grads": [4, 0], "optim": [4, 0], "no_shard": [0, 0]}[strategy]
    assert gathers == expected, f"{gathers} gathers"
    forward, backward = trace.run()
    gathers = [sum("gather" in event for event in events) for events in (forward, backward)]
    assert gathers == (expected if strategy == ZERO_3 else [0, 0]), f"{gathers} gathers in the second micro-batch"
