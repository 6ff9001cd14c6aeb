"""What surrounds both trainers: options, process group, timing, and the report."""

import contextlib
import gc
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from layers import HEAD_SIZE
from memory import MemoryOfAStep, MemoryWatch
from report import Report, Run, draw, show, write_json
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

RANK = int(os.environ.get("RANK", "0"))
# The second one is sampled: by then the optimizer has its states and all buffers are there.
STEPS_UNDER_WATCH = 2
NAMES = {"torch": "FSDP2", "v2": "megatron_fsdp_v2"}


class Fsdp(StrEnum):
    torch = "torch"
    v2 = "v2"
    both = "both"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(frozen=True)
class Options:
    """What is trained and how. ``batch`` is samples per rank and micro-batch."""

    steps: int
    batch: int
    layers: int
    width: int
    lr: float
    micro_batches: int = 2
    max_norm: float = 1.0
    bf16: bool = False
    checkpoint: bool = False
    seed: int = 0


class Meter:
    """Takes time and loss of every step; under a watch also the memory of the last one."""

    def __init__(self, device: torch.device, tell: Callable[[str], None], watch: MemoryWatch | None = None) -> None:
        self.device = device
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._tell, self._watch = tell, watch

    def steps(self, count: int) -> Iterator[int]:
        """The numbers of the steps; a step is what happens until the next is asked for."""
        for step in range(count):
            start = time.perf_counter()
            with self._watch.step() if self._watch and step == count - 1 else contextlib.nullcontext():
                yield step
            self.seconds.append(time.perf_counter() - start)
            self._tell(f"step {step + 1} of {count}, loss {self.losses[-1]:.4f}")

    def note_loss(self, loss: torch.Tensor) -> None:
        """The loss of this rank; the mean of all ranks is kept. Waits for the device."""
        dist.all_reduce(loss)
        mean = loss.item() / dist.get_world_size()
        if not math.isfinite(mean):
            raise RuntimeError(f"the loss of step {len(self.losses) + 1} is {mean}; a smaller --lr may help")
        self.losses.append(mean)


Train = Callable[[str, Options, DeviceMesh, Meter], None]


def cosine_with_warmup(steps: int) -> Callable[[int], float]:
    """Factor of the learning rate by step: up in a tenth of the steps, then down to a tenth along a cosine."""
    warmup = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return factor


def command(train: Train, defaults: Options, title: str, loss_unit: str) -> None:
    """Run a trainer as a command line program."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command(help=f"{title}: train with FSDP2 and with megatron_fsdp_v2 from the same seed, and compare.")
    def main(
        fsdp: Annotated[Fsdp, typer.Option(help="Whose fully_shard; both: one after the other.")] = Fsdp.both,
        steps: Annotated[int, typer.Option(min=2, help="Optimizer steps.")] = defaults.steps,
        batch: Annotated[int, typer.Option(min=1, help="Samples per rank and micro-batch.")] = defaults.batch,
        micro_batches: Annotated[int, typer.Option(min=1, help="Per step.")] = defaults.micro_batches,
        layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = defaults.layers,
        width: Annotated[int, typer.Option(min=HEAD_SIZE, help=f"A multiple of {HEAD_SIZE}.")] = defaults.width,
        lr: Annotated[float, typer.Option(help="Highest learning rate.")] = defaults.lr,
        max_norm: Annotated[float, typer.Option(help="Gradients are clipped to it.")] = defaults.max_norm,
        bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16, reduce in float32.")] = False,
        checkpoint: Annotated[bool, typer.Option("--checkpoint", help="Recompute activations in backward.")] = False,
        seed: Annotated[int, typer.Option(min=0)] = defaults.seed,
        device: Annotated[Device, typer.Option(help="auto: GPUs if there are any.")] = Device.auto,
        plot: Annotated[Path | None, typer.Option(metavar="FILE.png", dir_okay=False, help="Draw them.")] = None,
        json: Annotated[Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write every value.")] = None,
    ) -> None:
        _check_numbers(width, lr, max_norm)
        _check_paths(plot, json)
        options = Options(steps, batch, layers, width, lr, micro_batches, max_norm, bf16, checkpoint, seed)
        chosen = [Fsdp.torch, Fsdp.v2] if fsdp is Fsdp.both else [fsdp]
        with _process_group(device) as mesh:
            place = f"{mesh.size()} {'rank' if mesh.size() == 1 else 'ranks'} on {mesh.device_type.upper()}"
            runs = [_run(train, name, options, mesh) for name in chosen]
            report = Report(title, loss_unit, place, asdict(options), runs)
        if RANK == 0:
            _hand_over(report, plot, json)

    _on_this_rank(app)


def _on_this_rank(app: typer.Typer) -> None:
    """Only the first rank speaks about the options, and only it says by its exit code that they are wrong."""
    with contextlib.ExitStack() as stack:
        if RANK:
            silence = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        try:
            app()
        except SystemExit as stop:
            if RANK == 0:
                raise
            sys.exit(0 if stop.code == 2 else stop.code)


def _check_numbers(width: int, lr: float, max_norm: float) -> None:
    if width % HEAD_SIZE:
        raise typer.BadParameter(f"{width} is no multiple of {HEAD_SIZE}, the size of a head", param_hint="--width")
    for option, value in (("--lr", lr), ("--max-norm", max_norm)):
        if not (math.isfinite(value) and value > 0):
            raise typer.BadParameter(f"{value} is no positive number", param_hint=option)


def _check_paths(plot: Path | None, json: Path | None) -> None:
    for option, path in (("--plot", plot), ("--json", json)):
        if path is not None and not path.resolve().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.resolve().parent}", param_hint=option)
    if plot is not None:
        if plot.suffix != ".png":
            raise typer.BadParameter(f"{plot} doesn't end in .png", param_hint="--plot")
        if not importlib.util.find_spec("matplotlib"):
            raise typer.BadParameter(
                'needs matplotlib; install it, or this project with pip install ".[plot]"', param_hint="--plot"
            )


@contextlib.contextmanager
def _process_group(wanted: Device) -> Iterator[DeviceMesh]:
    """A 1-D mesh over the ranks of torchrun, or over this process alone."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = ("cuda" if gpus else "cpu") if wanted is Device.auto else wanted.value
    if kind == "cuda":
        if here > gpus:
            raise typer.BadParameter(f"{here} ranks need as many GPUs, there are {gpus}", param_hint="--device")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", **alone)
    try:
        yield init_device_mesh(kind, (dist.get_world_size(),))
    finally:
        dist.destroy_process_group()


def _run(train: Train, fsdp: Fsdp, options: Options, mesh: DeviceMesh) -> Run:
    """Train, then train anew for a few steps under watch: watching makes steps slow."""
    device = torch.device(mesh.device_type)
    with Console(stderr=True).status("") as status:

        def tell(text: str) -> None:
            status.update(f"{NAMES[fsdp]}: {text}")

        meter = Meter(device, tell)
        train(fsdp, options, mesh, meter)
        gc.collect()
        memory = _watched(train, fsdp, replace(options, steps=STEPS_UNDER_WATCH), mesh, tell)
        gc.collect()
    return Run(NAMES[fsdp], meter.losses, meter.seconds, memory)


def _watched(
    train: Train, fsdp: Fsdp, options: Options, mesh: DeviceMesh, tell: Callable[[str], None]
) -> MemoryOfAStep:
    device = torch.device(mesh.device_type)
    watch = MemoryWatch(device)
    with watch.training():
        train(fsdp, options, mesh, Meter(device, lambda text: tell(f"memory, {text}"), watch))
    return watch.memory


def _hand_over(report: Report, plot: Path | None, json: Path | None) -> None:
    show(report)
    if json is not None:
        write_json(report, json)
    if plot is not None:
        draw(report, plot)
