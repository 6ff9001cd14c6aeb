"""The demo's table compares a run with plain data parallel and with the last run of the other kind."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from megatron_fsdp_v2_mcore.demo import report
from megatron_fsdp_v2_mcore.demo.job import Job
from megatron_fsdp_v2_mcore.demo.measure import RankMeasure
from megatron_fsdp_v2_mcore.demo.progress import RunState
from rich.console import Console

LIGHT = RankMeasure(
    parameters=1_000_000,
    weight_bytes=2_000_000,
    gradient_bytes=2_000_000,
    optimizer_bytes=4_000_000,
    plain_weight_bytes=4_000_000,
    plain_gradient_bytes=4_000_000,
    plain_optimizer_bytes=8_000_000,
    steps=3,
    collectives_per_step={"all-gather": 9, "reduce-scatter": 5},
)
HEAVY = replace(LIGHT, weight_bytes=2_500_000)
JOB = Job(ranks=2, on_gpu=False, baseline=False, stock_flags=["--train-iters", "3"])


def finished_state() -> RunState:
    return RunState(step=3, total=3, losses=[5.9, 4.0, 3.5], step_ms=[900.0, 500.0, 500.0], validation_loss=3.6)


def finished_folder(folder: Path, *measures: RankMeasure) -> Path:
    (folder / "measured").mkdir(parents=True)
    for rank, measure in enumerate(measures):
        (folder / "measured" / f"rank{rank}.json").write_text(json.dumps(asdict(measure)))
    return folder


def printed(result: report.Result, other: report.Result | None) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(report.table(result, other))
    return console.file.getvalue()


def test_a_result_shows_the_heaviest_rank_and_survives_the_file(tmp_path: Path) -> None:
    folder = finished_folder(tmp_path / "run", LIGHT, HEAVY)
    result = report.collect(JOB, finished_state(), folder)
    assert result.measure == HEAVY
    assert (result.first_loss, result.last_loss, result.validation_loss) == (5.9, 3.5, 3.6)
    assert result.steps_per_second == pytest.approx(2.0)
    assert report.load(folder / report.RESULT_FILE) == result


def test_a_rank_without_a_measurement_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="1 of 2 ranks measured"):
        report.collect(JOB, finished_state(), finished_folder(tmp_path, LIGHT))
    with pytest.raises(ValueError, match="0 steps logged"):
        report.collect(JOB, RunState(), finished_folder(tmp_path / "other", LIGHT, LIGHT))


def test_the_table_has_state_collectives_and_both_other_columns(tmp_path: Path) -> None:
    mine = report.collect(JOB, finished_state(), finished_folder(tmp_path / "v2", HEAVY, LIGHT))
    other = replace(mine, kind="baseline", measure=replace(LIGHT, collectives_per_step={"all-reduce": 3}))
    rows = {line.split("│")[1].strip(): line for line in printed(mine, other).splitlines() if line.count("│") > 2}
    cells = {name: [cell.strip() for cell in line.split("│")[2:-1]] for name, line in rows.items()}
    assert cells["state per rank"] == ["8.50 MB", "8.00 MB", "16.00 MB"]
    assert cells["last loss"] == ["3.500000", "3.500000", ""]
    assert cells["all-gather per step"] == ["9", "0", ""]
    assert cells["all-reduce per step"] == ["0", "3", ""]
    assert "computed" in printed(mine, None)


def test_only_the_same_work_done_the_other_way_is_compared(tmp_path: Path) -> None:
    mine = report.collect(JOB, finished_state(), finished_folder(tmp_path / "mine", LIGHT, LIGHT))
    other = replace(mine, kind="baseline", validation_loss=1.25)

    def write(name: str, result: report.Result, age: int) -> None:
        path = tmp_path / name / report.RESULT_FILE
        path.parent.mkdir()
        path.write_text(json.dumps(asdict(result)))
        os.utime(path, (1_000_000 - age, 1_000_000 - age))

    write("same-kind", mine, age=0)
    write("other-flags", replace(other, stock_flags=["--train-iters", "4"]), age=1)
    write("other-ranks", replace(other, ranks=4), age=2)
    assert report.latest_counterpart(mine, tmp_path) is None
    write("right", other, age=3)
    write("older", replace(other, validation_loss=9.0), age=4)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / report.RESULT_FILE).write_text("{")
    assert report.latest_counterpart(mine, tmp_path) == other
