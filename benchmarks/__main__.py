"""The command ``python -m benchmarks``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from . import checkpoint_tables, growth_tables, memory_tables, tables


class Part(Enum):
    step = "step"
    host = "host"
    growth = "growth"
    memory = "memory"
    checkpoint = "checkpoint"
    all = "all"


_HELP = {
    "part": "step: training on two gloo ranks. host: what a wrapper costs the host. growth: how that grows with units "
    "and ranks, and wrapping with parameters. memory: the peak of a step, by what it is for. checkpoint: saving and "
    "loading beside DCP, and preparing a large state. all: all of it.",
    "json": "Also write every single value to this file.",
    "quick": "Few timed rounds: the exact figures are the same, the times are rough.",
}


# A preparation takes seconds, and varies little.
_PREPARATION_ROUNDS = 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    part: Annotated[Part, typer.Argument(help=_HELP["part"])] = Part.all,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help=_HELP["json"])
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=_HELP["quick"])] = False,
) -> None:
    """Measure megatron_fsdp_v2 beside PyTorch FSDP2, DDP and DCP, in one run on the CPU.

    Collectives, payload, copied bytes and tracked memory are exact. Times are not: compare the ratios of one run, on a
    machine that does nothing else. docs/performance.md says how each figure is counted.
    """
    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json_file.resolve().parent}", param_hint="--json")
    # Imported here, and not before, because torch comes with it.
    from .ranks import RankFailed

    progress, out = Console(stderr=True), Console(width=200)
    results: dict[str, Any] = {}
    try:
        if part in (Part.step, Part.all):
            results["step"] = _step(3 if quick else 25, progress, out)
        if part in (Part.host, Part.all):
            results["host"] = _host(20 if quick else 200, progress, out)
        if part in (Part.growth, Part.all):
            results["growth"] = _growth(3 if quick else 10, progress, out)
        if part in (Part.memory, Part.all):
            results["memory"] = _memory(progress, out)
        if part in (Part.checkpoint, Part.all):
            results["checkpoint"] = _checkpoint(3 if quick else 25, progress, out)
    except RankFailed as failure:
        progress.print(str(failure), markup=False, highlight=False)
        raise typer.Exit(1) from None
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")


def _step(rounds: int, progress: Console, out: Console) -> dict[str, Any]:
    from . import step

    with _shown(progress, "step: starting two ranks") as tell:
        result = step.run(rounds, lambda text: tell(f"step: {text}"))
    for table in (tables.exact_table(result), tables.copy_table(result), tables.time_table(result)):
        out.print(table)
    for text, met in tables.requirements(result):
        out.print(f"{'met' if met else 'MISSED'}: {text}", highlight=False)
    return dataclasses.asdict(result)


def _host(rounds: int, progress: Console, out: Console) -> list[dict[str, Any]]:
    from . import host

    with _shown(progress, "host: starting") as tell:
        figures = host.run(rounds, lambda text: tell(f"host: {text}"))
    out.print(tables.host_table(figures))
    return [dataclasses.asdict(row) for row in figures]


def _growth(rounds: int, progress: Console, out: Console) -> dict[str, Any]:
    from . import growth

    with _shown(progress, "growth: starting") as tell:
        result = growth.run(rounds, lambda text: tell(f"growth: {text}"))
    for table in (growth_tables.host_table(result.host), growth_tables.start_table(result.start)):
        out.print(table)
    return dataclasses.asdict(result)


def _memory(progress: Console, out: Console) -> list[dict[str, Any]]:
    from . import memory

    with _shown(progress, "memory: starting two ranks") as tell:
        results = memory.run(lambda text: tell(f"memory: {text}"))
    for result in results:
        out.print(memory_tables.kinds_table(result))
    out.print(memory_tables.units_table(results))
    return [dataclasses.asdict(result) for result in results]


def _checkpoint(rounds: int, progress: Console, out: Console) -> dict[str, Any]:
    from . import checkpoint, preparation

    with _shown(progress, "checkpoint: starting two ranks") as tell:
        storage = checkpoint.run(rounds, lambda text: tell(f"checkpoint: {text}"))
        prepared = preparation.run(min(rounds, _PREPARATION_ROUNDS), lambda text: tell(f"checkpoint: {text}"))
    out.print(checkpoint_tables.storage_table(storage))
    for text, met in checkpoint_tables.requirements(storage):
        out.print(f"{'met' if met else 'MISSED'}: {text}", highlight=False)
    out.print(checkpoint_tables.preparation_table(prepared))
    return {"storage": dataclasses.asdict(storage), "preparation": [dataclasses.asdict(row) for row in prepared]}


@contextmanager
def _shown(progress: Console, first: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done: on one live line of a terminal, as lines of their own elsewhere."""
    if not progress.is_terminal:
        yield lambda text: progress.print(text, markup=False, highlight=False)
        return
    with progress.status(first) as status:
        yield status.update


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
