"""What comes before DCP: the state dict of a model and its optimizer, fused matrices apart and every chunk known."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.checkpoint.chunk_metadata import attach_chunk_metadata, verify_chunks
from megatron_fsdp_v2.checkpoint.fused import FusedLayout, split_fused
from megatron_fsdp_v2.checkpoint.optimizer_state import SavedState, collect_state, create_state

from .growth import buffers_without_memory
from .host import no_collection
from .ranks import Tell, run_on_ranks
from .results import PreparationFigures
from .shapes import LAYERS, DeepSeekV3

WORLD_SIZE = 256
# A quarter, a half and all of the layers.
LAYER_COUNTS = (LAYERS // 4, LAYERS // 2, LAYERS)
# Of both models that are measured: the name of the parameters with gate and up projection in one.
FUSED = "gate_and_up"
STATES = ("exp_avg", "exp_avg_sq")


def run(rounds: int, tell: Tell) -> list[PreparationFigures]:
    """Measure every number of layers ``rounds`` times, in one process that stands for a rank of 256."""
    result: list[PreparationFigures] = run_on_ranks(measure, 1, WORLD_SIZE, "fake", tell, rounds, LAYER_COUNTS)[0]
    return result


def measure(tell: Tell, rounds: int, layer_counts: Iterable[int]) -> list[PreparationFigures]:
    """The part of the process that stands for all ranks. Processor seconds, with garbage collected in between."""
    found = []
    with buffers_without_memory():
        for layers in layer_counts:
            tell(f"preparing {layers} layers")
            model, optimizer = _sharded(layers)
            # What is imported or made at first use isn't what grows.
            keys = len(flat_keys(prepared_state(model, optimizer)))
            figures = PreparationFigures(layers, keys)
            for _ in range(rounds):
                with no_collection():
                    start = time.thread_time()
                    prepared_state(model, optimizer)
                    figures.seconds.append(time.thread_time() - start)
                gc.collect()
            found.append(figures)
    return found


def prepared_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What DCP saves or loads, on the memory of model and optimizer: the core's part of what an adapter does."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    layouts = {name: _halves(tensor) for name, tensor in weights.items() if name.endswith(FUSED)}
    states = collect_state(optimizer, {parameter: name for name, parameter in model.named_parameters()})
    prepared: dict[str, Any] = {"model": {}, "optimizer": {}}
    for name, weight in weights.items():
        attach_chunk_metadata(weight, "preprocess")
        prepared["model"] |= _parts(name, weight, layouts)
    for name, values in states.items():
        for kind, value in values.items():
            for part, tensor in (_parts(name, value, layouts) if kind in STATES else {name: value}).items():
                prepared["optimizer"].setdefault(part, {})[kind] = tensor
    verify_chunks(prepared)
    return prepared


def flat_keys(prepared: dict[str, Any]) -> list[str]:
    """One key for everything that a checkpoint lists."""
    states = [f"optimizer.{name}.{kind}" for name, values in prepared["optimizer"].items() for kind in values]
    return [f"model.{name}" for name in prepared["model"]] + states


def _parts(name: str, tensor: Any, layouts: dict[str, FusedLayout]) -> dict[str, Any]:
    if name not in layouts:
        return {name: tensor}
    return {f"{name}.{part}": value for part, value in split_fused(tensor, layouts[name]).items()}


def _halves(tensor: torch.Tensor) -> FusedLayout:
    rows = tensor.shape[0] // 2
    return FusedLayout((("gate", rows), ("up", rows)))


def _sharded(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The first so many layers of DeepSeek-V3 and an optimizer with state, both without memory."""
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    with torch.device("meta"):
        model = DeepSeekV3(layers)
    for unit in model.units:
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    names = {parameter: name for name, parameter in model.named_parameters()}
    step = SavedState((), torch.float32)
    saved = {
        name: {kind: SavedState(tuple(parameter.shape), torch.float32) for kind in STATES} | {"step": step}
        for parameter, name in names.items()
    }
    create_state(optimizer, names, saved)
    return model, optimizer
