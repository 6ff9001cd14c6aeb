"""How costs grow: host time per unit with units and ranks, and the time to wrap DeepSeek-V3 with its parameters."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from megatron_fsdp_v2 import fully_shard

from .host import WARMUP, no_collection, timed_pass
from .models import TinyStack
from .ranks import Tell, run_on_ranks
from .results import PLAIN, GrowthFigures, GrowthResult, StartFigures
from .shapes import LAYERS, DeepSeekV3
from .variants import HOST_VARIANTS

WORLD_SIZE = 1024
# (units, ranks): first more units, then more ranks.
POINTS = ((8, 8), (48, 8), (128, 8), (512, 8), (48, 2), (48, 64), (48, 1024))
START_LAYERS = (8, 16, 31, LAYERS)
# FSDP2 takes twenty times as long, so it wraps the smaller models alone.
PEER_LAYERS = (8, 16)
START_ROUNDS = 3


def run(rounds: int, tell: Tell) -> GrowthResult:
    """Measure all points ``rounds`` times in turn, and wrapping at most three times."""
    result: GrowthResult = run_on_ranks(measure, 1, WORLD_SIZE, "fake", tell, rounds)[0]
    return result


def measure(tell: Tell, rounds: int) -> GrowthResult:
    """The part of the process that stands for all ranks."""
    start = measure_start(tell, min(rounds, START_ROUNDS), START_LAYERS, PEER_LAYERS)
    return GrowthResult(measure_host(tell, rounds, POINTS), start)


def measure_host(tell: Tell, rounds: int, points: tuple[tuple[int, int], ...]) -> list[GrowthFigures]:
    """Host time of the plain modules and all variants at every point, interleaved."""
    models: list[tuple[GrowthFigures, nn.Module]] = []
    for units, ranks in points:
        tell(f"building {units} units on {ranks} ranks")
        # The ranks of a mesh are the first ones of the group.
        mesh = DeviceMesh("cpu", torch.arange(ranks))
        models.append((GrowthFigures(PLAIN, units=units, ranks=ranks), TinyStack(units)))
        for variant in HOST_VARIANTS:
            model = TinyStack(units)
            wrapped = variant.wrap(model, list(model.units), mesh)
            models.append((GrowthFigures(variant.name, units=units, ranks=ranks), wrapped))
    for figures, model in models:
        for _ in range(WARMUP):
            timed_pass(model, figures.units)
    sent = [collectives_of_pass(model) for _, model in models]
    with no_collection():
        for number in range(rounds):
            tell(f"timed round {number + 1} of {rounds}")
            for (figures, model), (sent_forward, sent_backward) in zip(models, sent, strict=True):
                forward, backward = timed_pass(model, figures.units)
                figures.forward.append(forward)
                figures.backward.append(backward)
                figures.forward_sending.append(sent_forward.seconds() / figures.units * 1e6)
                figures.backward_sending.append(sent_backward.seconds() / figures.units * 1e6)
                gc.collect(0)
    return [figures for figures, _ in models]


class CollectiveRecorder(TorchDispatchMode):
    """Keeps the collectives that are issued, with tensors of the same sizes in place of theirs.

    The simulated group sends nothing, but copies a rank's part once per rank, which no wrapper can help.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self.calls.append((func, *tree_map_only(torch.Tensor, torch.zeros_like, (args, kwargs))))
        return func(*args, **kwargs)

    def seconds(self) -> float:
        """Processor time that the same calls take by themselves."""
        with torch.no_grad():
            start = time.thread_time()
            for func, args, kwargs in self.calls:
                func(*args, **kwargs)
            return time.thread_time() - start


def collectives_of_pass(model: nn.Module) -> tuple[CollectiveRecorder, CollectiveRecorder]:
    """The collectives of one forward and of one backward."""
    model.zero_grad(set_to_none=True)
    x = torch.ones(1, 8, requires_grad=True)
    with CollectiveRecorder() as forward:
        loss = model(x).sum()
    with CollectiveRecorder() as backward:
        loss.backward()
    return forward, backward


def measure_start(tell: Tell, rounds: int, layers: tuple[int, ...], peer_layers: tuple[int, ...]) -> list[StartFigures]:
    """Processor time to wrap the first so many layers of DeepSeek-V3."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    sides: list[tuple[str, Callable[..., Any], tuple[int, ...]]] = [
        ("FSDP2", torch_fully_shard, peer_layers),
        ("v2 ZeRO-3", fully_shard, layers),
    ]
    found = []
    with buffers_without_memory():
        for name, function, sizes in sides:
            # What is imported or compiled at first use isn't what grows.
            _wrapping_seconds(function, mesh, 1)
            for count in sizes:
                tell(f"wrapping {count} layers with {name}")
                runs = [_wrapping_seconds(function, mesh, count) for _ in range(rounds if name != "FSDP2" else 1)]
                _, parameters, elements = runs[0]
                found.append(StartFigures(name, count, parameters, elements, [seconds for seconds, _, _ in runs]))
    return found


def _wrapping_seconds(function: Callable[..., Any], mesh: DeviceMesh, layers: int) -> tuple[float, int, int]:
    """Seconds to wrap a new model, and its numbers of parameter tensors and of elements."""
    with torch.device("meta"):
        model = DeepSeekV3(layers)
    params = list(model.parameters())
    counts = len(params), sum(param.numel() for param in params)
    del params
    gc.collect()
    start = time.thread_time()
    for unit in model.units:
        function(unit, mesh=mesh)
    return time.thread_time() - start, *counts


@contextmanager
def buffers_without_memory() -> Iterator[None]:
    """Leave our buffers on the meta device, as FSDP2 leaves its shards.

    Wrapping a module on meta gives it memory and values, one unit at a time; 22 GB for a layer of 256 experts. So two
    names of the entry point are replaced: buffers are made on meta, and nothing is initialised. Everything else runs.
    """
    # As an attribute of the package this is the function.
    entry: Any = sys.modules["megatron_fsdp_v2.fully_shard"]
    originals = {name: getattr(entry, name) for name in ("data_parallel_mesh", "materialize")}

    def on_meta(mesh: DeviceMesh | None) -> Any:
        return replace(originals["data_parallel_mesh"](mesh), device=torch.device("meta"))

    entry.data_parallel_mesh, entry.materialize = on_meta, lambda sources, modules, device: []
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(entry, name, original)
