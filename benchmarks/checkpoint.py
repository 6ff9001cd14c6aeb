"""Saving and loading real files: what this project adds to DCP, beside DCP on evenly sharded tensors."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp_v2 import fully_shard, load_checkpoint, save_checkpoint

from .preparation import FUSED, fused_layouts
from .ranks import Tell, run_on_ranks
from .results import StorageFigures, StorageResult
from .shapes import Weights

LAYERS, WIDTH, INNER = 6, 1024, 1408


class Side(Protocol):
    """One way to save and load a model with its optimizer."""

    name: str

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...


def run(rounds: int, tell: Tell) -> StorageResult:
    """Save and load ``rounds`` times in turn on two gloo ranks."""
    result: StorageResult = run_on_ranks(measure, 2, 2, "gloo", tell, rounds)[0]
    return result


def measure(tell: Tell, rounds: int) -> StorageResult:
    """The part of one rank; times are those of the slower one. Sides take turns, in another order every round."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tell("building two sharded models")
    sides: list[Side] = [PlainDCP(mesh), Ours(mesh)]
    found = [StorageFigures(side.name) for side in sides]
    with _shared_folder() as folder:
        # The first round is not counted: imports and first-time allocations.
        for number in range(rounds + 1):
            tell(f"round {number} of {rounds}")
            pairs = list(zip(sides, found, strict=True))
            for side, figures in pairs if number % 2 else reversed(pairs):
                saved, loaded = (_slowest_seconds(step, folder / side.name) for step in (side.save, side.load))
                _remove(folder / side.name)
                if number:
                    figures.save.append(saved)
                    figures.load.append(loaded)
    return StorageResult(_state_bytes(), found)


class PlainDCP:
    """DCP as it is, on FSDP2's tensors and the states of a torch optimizer."""

    name = "DCP"

    def __init__(self, mesh: DeviceMesh) -> None:
        self._model, self._optimizer = _built(lambda module: torch_fully_shard(module, mesh=mesh))

    def save(self, path: Path) -> None:
        dcp.save(self._state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        dcp.load(self._state(), checkpoint_id=path)

    def _state(self) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        states = {names[parameter]: state for parameter, state in self._optimizer.state.items()}
        return {"model": self._model.state_dict(), "optimizer": states}


class Ours:
    """As users do it: compared between ranks and with the checkpoint, and safe from a kill at any moment."""

    name = "v2"

    def __init__(self, mesh: DeviceMesh) -> None:
        self._model, self._optimizer = _built(lambda module: fully_shard(module, mesh=mesh))
        self._fused = fused_layouts(self._model)

    def save(self, path: Path) -> None:
        save_checkpoint(self._model, self._optimizer, path, fused=self._fused)

    def load(self, path: Path) -> None:
        load_checkpoint(self._model, self._optimizer, path, fused=self._fused)


def _built(shard: Callable[[nn.Module], Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model of gated layers and an AdamW that has made a step."""
    shapes = {"down": (WIDTH, INNER), FUSED: (2 * INNER, WIDTH)}
    model = nn.Sequential(*[Weights(**shapes) for _ in range(LAYERS)]).float()
    for module in (*model, model):
        shard(module)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.fill_(1.0)
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def _state_bytes() -> int:
    """Of weights and the two states of AdamW, fp32."""
    return 3 * 4 * LAYERS * 3 * INNER * WIDTH


def _slowest_seconds(function: Callable[[Path], None], path: Path) -> float:
    # What was written before is on the disk, and delays nobody.
    os.sync()
    dist.barrier()
    start = time.perf_counter()
    function(path)
    seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """A folder that all ranks know, removed at the end."""
    name = [tempfile.mkdtemp(prefix="checkpoints-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, src=0)
    assert name[0] is not None
    try:
        yield Path(name[0])
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(name[0], ignore_errors=True)
