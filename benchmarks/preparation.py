"""What comes before DCP: the state dict of a model and its optimizer, fused matrices apart and every chunk known."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.checkpoint.fused import FusedLayout
from megatron_fsdp_v2.checkpoint.optimizer_state import SavedState, create_state
from megatron_fsdp_v2.checkpoint.state_dict import build_state_dict
from megatron_fsdp_v2.checkpoint.subject import Subject

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
            subject = Subject(model, (optimizer,), fused_layouts(model))
            figures = PreparationFigures(layers, keys=len(build_state_dict(subject, {}).flat))
            for _ in range(rounds):
                with no_collection():
                    start = time.thread_time()
                    build_state_dict(subject, {})
                    figures.seconds.append(time.thread_time() - start)
                gc.collect()
            found.append(figures)
    return found


def fused_layouts(model: nn.Module) -> dict[str, FusedLayout]:
    """Gate and up projection in every parameter that holds both."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if name.endswith(FUSED)}
    return {name: FusedLayout(((".gate", rows // 2), (".up", rows // 2))) for name, (rows, *_) in shapes.items()}


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
