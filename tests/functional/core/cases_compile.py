"""Cases: torch.compile of units and of whole models, graphs counted beside FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as their_fully_shard

from megatron_fsdp_v2 import fully_shard
from tests.functional.core.cases_support import Duel, Net, Ranks, case, squared

STEPS, MICRO_BATCHES = 4, 2


def compile_units_in_place(model: Any, backend: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def compile_units_by_wrapping(model: Any, backend: Any) -> Any:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=backend)
    return model


def compile_in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def compile_by_wrapping(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


WAYS = {
    "units in place": compile_units_in_place,
    "units wrapped": compile_units_by_wrapping,
    "model in place": compile_in_place,
    "model wrapped": compile_by_wrapping,
}


def shard(fn: Callable[..., Any], net: Any) -> Any:
    for layer in net.layers:
        fn(layer)
    return fn(net)


def counted(model: Any, compiler: Callable[[Any, Any], Any], data: list[torch.Tensor]) -> dict[str, Any]:
    """Trains, and tells graphs, breaks of graphs by reason, and graphs made after the second step."""
    import torch._dynamo as dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    dynamo.reset()
    dynamo.utils.counters.clear()
    backend = CompileCounterWithBackend("aot_eager")
    run = compiler(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    after_second = 0
    for step in range(STEPS):
        for part in data:
            squared(run, part).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            after_second = backend.frame_count
    return {
        "graphs": backend.frame_count,
        "breaks": dict(dynamo.utils.counters["graph_break"]),
        "later": backend.frame_count - after_second,
    }


@case(worlds=(1, 2))
def as_many_graphs_as_fsdp2(ranks: Ranks) -> None:
    """A unit is one graph in whatever way it is compiled, none breaks for our sake, and none is made again."""
    torch.manual_seed(0)
    net = Net()
    data = [torch.randn(ranks.world, 4, 5)[ranks.rank] for _ in range(MICRO_BATCHES)]
    for way, compiler in WAYS.items():
        ours = counted(shard(fully_shard, copy.deepcopy(net)), compiler, data)
        theirs = counted(shard(their_fully_shard, copy.deepcopy(net)), compiler, data)
        assert ours["graphs"] >= 1, way
        assert ours == theirs, f"{way}: {ours}, FSDP2 {theirs}"
        assert ours["breaks"] == {}, way
        assert ours["later"] == 0, way


@case(worlds=(1, 2, 3), strategies=("optim_grads_params", "optim"))
def compiled_units_train_alike(ranks: Ranks, strategy: str) -> None:
    def shard_and_compile(net: nn.Module) -> nn.Module:
        shard(lambda module: fully_shard(module, strategy=strategy), net)
        return compile_units_in_place(net, "aot_eager")

    Duel(ranks, Net(), shard_and_compile).train(steps=3)
