"""What a run came to: tables in the terminal, a picture, a file."""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memory import MemoryOfAStep
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

MIB = 2**20
ROWS = 13


@dataclass(frozen=True)
class Run:
    """One training: mean loss of all ranks and seconds of each step, memory of one more step of the first rank."""

    name: str
    losses: list[float]
    seconds: list[float]
    memory: MemoryOfAStep

    @property
    def seconds_per_step(self) -> float:
        """Median; the first step, in which everything is set up, doesn't count."""
        return statistics.median(self.seconds[1:])


@dataclass(frozen=True)
class Report:
    """``place`` says on what the ranks ran. The runs saw the same data and started from the same weights."""

    title: str
    loss_unit: str
    place: str
    options: dict[str, Any]
    runs: list[Run]

    @property
    def differences(self) -> list[float]:
        """By step, how far the second run's loss is from the first one's, relative to it. Empty for a single run."""
        if len(self.runs) < 2:
            return []
        first, second = self.runs
        return [abs(b - a) / abs(a) for a, b in zip(first.losses, second.losses, strict=True)]


def show(report: Report) -> None:
    """Print the loss curves and what a step costs."""
    console = Console()
    console.print(_curves(report))
    if report.differences:
        console.print(f"Largest relative difference of the losses: {max(report.differences):.1e}\n")
    console.print(_costs(report))


def _curves(report: Report) -> Table:
    table = Table(title=f"{report.title}, {report.place}: loss ({report.loss_unit})", title_justify="left")
    table.add_column("step", justify="right")
    for run in report.runs:
        table.add_column(run.name, justify="right")
    if report.differences:
        table.add_column("difference", justify="right")
    table.add_column(report.runs[-1].name, width=24)
    steps = len(report.runs[0].losses)
    highest = max(report.runs[-1].losses)
    for step in sorted({round(row * (steps - 1) / (ROWS - 1)) for row in range(ROWS)}):
        losses = [run.losses[step] for run in report.runs]
        difference = [f"{report.differences[step]:.0e}"] if report.differences else []
        bar = Bar(highest, 0, losses[-1])
        table.add_row(str(step + 1), *(f"{loss:.5f}" for loss in losses), *difference, bar)
    return table


def _costs(report: Report) -> Table:
    table = Table(title="One step", title_justify="left")
    for heading in ("", "seconds, median", "least", "peak MiB of a rank"):
        table.add_column(heading, justify="right" if heading else "left")
    for run in report.runs:
        least = min(run.seconds[1:])
        table.add_row(run.name, f"{run.seconds_per_step:.3f}", f"{least:.3f}", f"{run.memory.peak / MIB:.2f}")
    return table


def write_json(report: Report, path: Path) -> None:
    """Every single value; bytes and seconds."""
    path.write_text(json.dumps(asdict(report), indent=1) + "\n")


def draw(report: Report, path: Path) -> None:
    """A PNG: the loss curves on the left, memory over one step on the right."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (losses, memory) = pyplot.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    figure.suptitle(f"{report.title}, {report.place}")
    _draw_losses(losses, report)
    _draw_memory(memory, report)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_losses(axes: Any, report: Report) -> None:
    # The first one is drawn wide and pale, so that it is seen below the second.
    for run, look in zip(report.runs, _looks(), strict=False):
        axes.plot(range(1, len(run.losses) + 1), run.losses, label=run.name, **look)
    title = "Loss"
    if report.differences:
        title += f", largest relative difference {max(report.differences):.1e}"
    axes.set(title=title, xlabel="step", ylabel=f"loss ({report.loss_unit})")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_memory(axes: Any, report: Report) -> None:
    names = [phase.name for phase in report.runs[0].memory.phases]
    for run, look in zip(report.runs, _looks(), strict=False):
        places, values = [], []
        for index, phase in enumerate(run.memory.phases):
            # Sharding takes more operations in one than in the other: every phase is stretched to the same width.
            count = len(phase.samples)
            places += [index + place / count for place in range(count)]
            values += [sample / MIB for sample in phase.samples]
        axes.plot(places, values, label=f"{run.name}, peak {run.memory.peak / MIB:.2f} MiB", **look)
    for index in range(1, len(names)):
        axes.axvline(index, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xticks([index + 0.5 for index in range(len(names))], names)
    axes.tick_params(axis="x", length=0)
    axes.set(title="Memory over one step", xlabel="phase of the step, operation by operation", xlim=(0, len(names)))
    axes.set_ylabel("MiB of a rank")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower center")


def _looks() -> list[dict[str, Any]]:
    return [
        {"color": "tab:orange", "linewidth": 3.5, "alpha": 0.55},
        {"color": "tab:blue", "linewidth": 1.3},
    ]
