"""Cases: what `describe` predicts is what a step sends and what buffers hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.counting import StepCounter
from megatron_fsdp_v2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from megatron_fsdp_v2.explain import describe
from megatron_fsdp_v2.explaining.plan import Plan
from tests.functional.core.cases_support import (
    STRATEGIES,
    WIDTH,
    ZERO_3,
    Net,
    Ranks,
    adamw,
    case,
    shard_net,
    squared,
    units_of,
)

TWO_AXES = tuple(f"{strategy}+{outer}" for strategy in STRATEGIES for outer in ("no_shard", "optim"))[:-1]
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16, grad_comm_dtype=torch.float32)

Traffic = dict[str, dict[str, tuple[int, int]]]


def predicted(plan: Plan) -> Traffic:
    """(calls, bytes) by phase and kind."""
    calls: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    sent: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for one in plan.totals.collectives:
        calls[one.phase][one.kind] += one.calls
        sent[one.phase][one.kind] += one.bytes
    return {phase: {kind: (calls[phase][kind], sent[phase][kind]) for kind in calls[phase]} for phase in calls}


def counted(model: nn.Module, steps: int = 3) -> Traffic:
    """The same, counted in the last of some steps: what the first backward gathers ahead is a guess."""
    optimizer = adamw([param for param in model.parameters() if param.requires_grad])
    for _ in range(steps):
        with StepCounter() as forward:
            loss = squared(model, torch.randn(4, WIDTH))
        with StepCounter() as backward:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    counters = {"forward": forward, "backward": backward}
    return {
        phase: {kind: (counter.calls[kind], counter.payload[kind]) for kind in counter.calls}
        for phase, counter in counters.items()
    }


def hold(model: Any) -> dict[str, int]:
    """Bytes of the storages of one step, summed over groups by kind, and the largest unit's gathered ones."""
    squared(model, torch.randn(4, WIDTH)).backward()
    held: Counter[str] = Counter()
    for unit in units_of(model):
        for group in unit.groups:
            at_rest = [] if group.rest is not None and group.gathers_per_use else [group.compute]
            seen = {_storage(buffer): _nbytes(buffer) for buffer in at_rest}
            held["compute_weights"] += sum(seen.values())
            held["main_weights"] += 0 if _storage(group.main) in seen else _nbytes(group.main)
            if group.gradients is not None:
                shown = group.gradients.main._shown
                held["main_gradients"] += _nbytes(group.gradients.main.buffer) + (_nbytes(shown.buffer) if shown else 0)
    for unit in units_of(model):
        for module in unit.modules:
            module.unshard()
        gathered = sum(_gathered_bytes(group) for group in unit.groups)
        held["largest_gathered_unit"] = max(held["largest_gathered_unit"], gathered)
        for module in unit.modules:
            module.reshard()
    model.zero_grad()
    return dict(held)


def _gathered_bytes(group: Any) -> int:
    if not group.gathers_per_use:
        return 0
    return _nbytes(group.full) + (_nbytes(group.compute) if group.rest is not None else 0)


def _storage(buffer: Any) -> int:
    return buffer.pieces[0].untyped_storage()._cdata


def _nbytes(buffer: Any) -> int:
    return buffer.pieces[0].untyped_storage().nbytes()


def check(model: Any) -> None:
    """The prediction before the first forward, that after a step, and the facts are the same."""
    before = describe(model)
    real = counted(model)
    plan = describe(model)
    assert predicted(plan) == real, (predicted(plan), real)
    assert before == plan
    held = hold(model)
    assert {name: getattr(plan.totals, name) for name in held} == held, held


class LateNet(Net):
    """A Net whose root has no parameter of its own, so that what is used last is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", self._parameters.pop("scale").detach())


def _frozen(*names: str) -> Callable[[], Net]:
    def build() -> Net:
        net = LateNet()
        for name in names:
            net.get_submodule(name).requires_grad_(False)
        return net

    return build


def _models() -> list[Callable[[], Net]]:
    # Frozen where no gradient comes, where one passes, in part, and all of the root's own.
    return [Net, _frozen("layers.0"), _frozen("layers.1", "layers.2.norm"), _frozen("head")]


@case(worlds=(2,), strategies=STRATEGIES)
def every_strategy(ranks: Ranks, strategy: str) -> None:
    for build in _models():
        net = build()
        shard_net(strategy)(net)
        check(net)


@case(worlds=(2,))
def every_way_to_reshard(ranks: Ranks) -> None:
    for reshard in (True, False, None):
        for build in _models():
            for after_backward in (True, False):
                net = build()
                shard_net(ZERO_3, reshard_after_forward=reshard)(net)
                net.set_reshard_after_backward(after_backward)
                check(net)


@case(worlds=(2,), strategies=STRATEGIES)
def several_dtypes(ranks: Ranks, strategy: str) -> None:
    for build in _models():
        net = build()
        net.layers[1].norm.double()
        if isinstance(net, LateNet):
            net.scale = net.scale.bfloat16()
        shard_net(strategy, mp_policy=MIXED)(net)
        check(net)


@case(worlds=(2,), strategies=STRATEGIES)
def weights_that_rest_elsewhere(ranks: Ranks, strategy: str) -> None:
    net = _frozen("layers.1")()
    shard_net(strategy, offload_policy=CPUOffloadPolicy())(net)
    check(net)


@case(worlds=(2,))
def units_of_several_modules_and_of_none(ranks: Ranks) -> None:
    net = Net()
    fully_shard([net.layers[0], net.layers[1]])
    fully_shard(net.layers[2].norm)
    net.layers[2].up.requires_grad_(False)
    fully_shard(net.layers[2])
    net.head.requires_grad_(False)
    fully_shard(net, ignored_params=[net.scale.requires_grad_(False)])
    check(net)


@case(worlds=(2,))
def weights_that_backward_does_not_need(ranks: Ranks) -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.by

    for frozen in (True, False):
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), Shift().requires_grad_(not frozen))
        for part in (*model, model):
            fully_shard(part)
        model[1].set_unshard_in_backward(False)
        check(model)


@case(worlds=(2,))
def what_gradients_pass_is_learned_from_a_backward(ranks: Ranks) -> None:
    net = Net()
    net.layers[0].requires_grad_(False)
    shard_net()(net)
    # Scale is registered before the layers, though used behind them.
    assert [unit.has_backward for unit in describe(net).units] == [True] * 4
    real = counted(net)
    plan = describe(net)
    assert [unit.has_backward for unit in plan.units] == [True, False, True, True]
    assert predicted(plan) == real


@case(worlds=(4,), strategies=TWO_AXES)
def two_axes(ranks: Ranks, names: str) -> None:
    strategy, _, outer = names.partition("+")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    net = _frozen("layers.1", "layers.2.norm")()
    shard_net(strategy, mesh=mesh, outer_strategy=outer)(net)
    check(net)


@case(worlds=(4,))
def two_axes_and_weights_that_rest_elsewhere(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for outer in ("no_shard", "optim"):
        net = _frozen("layers.1", "layers.2.norm")()
        shard_net(mesh=mesh, outer_strategy=outer, offload_policy=CPUOffloadPolicy())(net)
        check(net)


@case(worlds=(4,))
def resharding_to_neighbours(ranks: Ranks) -> None:
    for build in _models():
        net = build()
        shard_net(reshard_after_forward=2)(net)
        check(net)
        unit = units_of(net)[1]
        kept = sum(sum(group._part._sizes) * group.precision.compute.itemsize for group in unit.groups)
        plan = describe(net).units[1]
        assert plan.bytes.kept_weights == (kept if plan.has_backward else 0)
