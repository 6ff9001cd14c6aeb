"""The table at the end of a run, and the file that a later run compares itself with."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from .job import Job
from .measure import RankMeasure
from .progress import RunState

RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Result:
    """What a finished run came to. Losses in nats per token; bytes are those of the rank that holds most."""

    kind: str
    ranks: int
    on_gpu: bool
    stock_flags: list[str]
    steps: int
    first_loss: float
    last_loss: float
    validation_loss: float | None
    steps_per_second: float
    measure: RankMeasure

    @property
    def loss_fell(self) -> bool:
        """Whether the last step's loss is below the first one's."""
        return self.last_loss < self.first_loss

    def comparable(self, other: "Result") -> bool:
        """Whether both did the same work and differ at most in how the ranks share the state."""
        mine = (self.ranks, self.on_gpu, self.steps, self.stock_flags)
        return mine == (other.ranks, other.on_gpu, other.steps, other.stock_flags)


def collect(job: Job, state: RunState, folder: Path) -> Result:
    """The result of the run in ``folder``, written there as well.

    Raises:
        ValueError: the log shows no training step, or a rank left no measurement.
    """
    measures = [
        RankMeasure(**json.loads(path.read_text())) for path in sorted((folder / "measured").glob("rank*.json"))
    ]
    if not state.losses or len(measures) != job.ranks:
        raise ValueError(f"{len(state.losses)} steps logged, {len(measures)} of {job.ranks} ranks measured")
    result = Result(
        kind=job.kind,
        ranks=job.ranks,
        on_gpu=job.on_gpu,
        stock_flags=job.stock_flags,
        steps=state.step,
        first_loss=state.losses[0],
        last_loss=state.losses[-1],
        validation_loss=state.validation_loss,
        steps_per_second=state.steps_per_second() or math.nan,
        measure=max(measures, key=held_bytes),
    )
    (folder / RESULT_FILE).write_text(json.dumps(asdict(result), indent=2))
    return result


def held_bytes(measure: RankMeasure) -> int:
    """Weights, gradients and optimizer states of one rank."""
    return measure.weight_bytes + measure.gradient_bytes + measure.optimizer_bytes


def load(path: Path) -> Result | None:
    """A result that an earlier run wrote; None when it isn't one."""
    try:
        fields = json.loads(path.read_text())
        return Result(**{**fields, "measure": RankMeasure(**fields["measure"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def latest_counterpart(result: Result, runs: Path) -> Result | None:
    """The newest comparable run of the other kind below ``runs``."""
    for path in sorted(runs.glob(f"*/{RESULT_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True):
        other = load(path)
        if other and other.kind != result.kind and other.comparable(result):
            return other
    return None


def table(result: Result, other: Result | None) -> Table:
    """The comparison: this run, plain data parallel by arithmetic, and an earlier run of the other kind."""
    measure = result.measure
    shown = Table(title=f"{result.steps} steps, {result.ranks} ranks, {measure.parameters:,} parameters")
    shown.add_column("")
    runs = [result] if other is None else [result, other]
    for run in runs:
        shown.add_column(_title(run) + ("" if run is result else "\n(earlier run)"), justify="right")
    shown.add_column("plain data\nparallel\n(computed)", justify="right")
    for name, cells, plain in _rows(runs):
        shown.add_row(name, *cells, plain)
    return shown


def _title(run: Result) -> str:
    return "v2\n(this package)" if run.kind == "v2" else "stock\nDistributedOptimizer"


def _rows(runs: list[Result]) -> list[tuple[str, list[str], str]]:
    measures = [run.measure for run in runs]
    plain = measures[0]
    optimizer = plain.plain_optimizer_bytes
    total = None if optimizer is None else plain.plain_weight_bytes + plain.plain_gradient_bytes + optimizer
    rows = [
        ("first loss", [f"{run.first_loss:.6f}" for run in runs], ""),
        ("last loss", [f"{run.last_loss:.6f}" for run in runs], ""),
        ("validation loss", [_loss(run.validation_loss) for run in runs], ""),
        ("steps per second", [f"{run.steps_per_second:.2f}" for run in runs], ""),
        ("weights per rank", [_mb(m.weight_bytes) for m in measures], _mb(plain.plain_weight_bytes)),
        ("gradients per rank", [_mb(m.gradient_bytes) for m in measures], _mb(plain.plain_gradient_bytes)),
        ("optimizer per rank", [_mb(m.optimizer_bytes) for m in measures], _mb(optimizer)),
        ("state per rank", [_mb(held_bytes(m)) for m in measures], _mb(total)),
    ]
    kinds = dict.fromkeys(kind for m in measures for kind in m.collectives_per_step)
    for kind in kinds:
        rows.append((f"{kind} per step", [str(m.collectives_per_step.get(kind, 0)) for m in measures], ""))
    return rows


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def _mb(size: int | None) -> str:
    return "-" if size is None else f"{size / 1e6:.2f} MB"
