"""Ranks that save without end and get killed meanwhile."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
import torch.nn as nn

from megatron_fsdp_v2 import fully_shard, load_checkpoint, save_checkpoint

# Always the same folder, and another one for each step.
SAME, ANOTHER = "latest", "step_{}"


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, with state."""
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def save_until_killed(rank: int, world: int, folder: str, victims: list[int], delay: float, steps: int | None) -> None:
    """Resumes from the last step and saves the next ones, in which every weight is the number of the step.

    Rank 0 notes in a log when a save begins and ends. ``delay`` seconds after the first step's saves the victims are
    killed. With ``steps`` it saves that many from the first on, and nobody is killed.
    """
    model, _ = new_model()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    done = load_checkpoint(model, optimizer, Path(folder) / SAME)["step"] if steps is None else 0
    log = os.open(Path(folder) / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for step in count(done + 1) if steps is None else range(done + 1, done + 1 + steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step)
                optimizer.state[parameter]["momentum_buffer"].fill_(-step)
        for name in (SAME, ANOTHER.format(step)):
            if rank == 0:
                os.write(log, f"begin {name} {step}\n".encode())
            save_checkpoint(model, optimizer, Path(folder) / name, extra={"step": step})
            if rank == 0:
                os.write(log, f"end {name} {step}\n".encode())
        if rank in victims and step == done + 1:
            subprocess.Popen(["/bin/sh", "-c", f"sleep {delay:.3f}; kill -9 {os.getpid()}"])


def read_log(folder: Path) -> Iterator[tuple[str, str, int]]:
    """What rank 0 noted: begin or end, folder, step."""
    for line in (folder / "log").read_text().splitlines():
        what, name, step = line.split()
        yield what, name, int(step)


def loaded_step(path: Path) -> int:
    """The step of a checkpoint, read by one process, once it's sure that all of it is of that step."""
    model, optimizer = new_model()
    step = load_checkpoint(model, optimizer, path)["step"]
    for name, parameter in model.named_parameters():
        assert (parameter == step).all(), f"{path}, {name}: {parameter} at step {step}"
        assert (optimizer.state[parameter]["momentum_buffer"] == -step).all(), f"{path}, momentum of {name}"
    return step
