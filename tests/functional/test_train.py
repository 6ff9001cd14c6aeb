"""`mfsdp2 train` as a newcomer runs it: stock and v2 give the same numbers, and Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from megatron_fsdp_v2_mcore.demo import corpus

from tests.functional.test_train_launch import assert_gone
from tests.harness.command import run_command
from tests.harness.spawn import rank_environment

COMMAND = [str(Path(sys.executable).with_name("mfsdp2")), "train"]
STEPS = 12
SMALL = ["--train-iters", str(STEPS), "--num-layers", "2", "--hidden-size", "128", "--eval-iters", "2"]


@dataclass(frozen=True)
class Run:
    """What a finished run printed, the result it wrote, and the loss of each step in the log of the last rank."""

    output: str
    result: dict[str, object]
    losses: list[float]


def train(output: Path, kind: str, *options: str) -> Run:
    finished = run_command([*COMMAND, "--output", str(output), *options, *SMALL], timeout=240)
    assert finished.returncode == 0, finished.output
    (folder,) = output.glob(f"*-{kind}")
    (log,) = folder.glob("ranks/*/attempt_0/1/stdout.log")
    steps = [line for line in log.read_text().splitlines() if " iteration " in line and "lm loss:" in line]
    losses = [float(line.split("lm loss:")[1].split()[0]) for line in steps]
    return Run(finished.output, json.loads((folder / "result.json").read_text()), losses)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpus in it, so that only the first training has to build it."""
    folder = tmp_path_factory.mktemp("text")
    corpus.build(folder)
    return folder


@pytest.fixture
def output(tmp_path: Path, text: Path) -> Path:
    (tmp_path / "data").symlink_to(text)
    return tmp_path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    output = tmp_path_factory.mktemp("runs")
    return train(output, "baseline", "--baseline"), train(output, "v2")


def test_the_loss_falls_clearly(runs: tuple[Run, Run]) -> None:
    for run in runs:
        assert len(run.losses) == STEPS
        assert run.losses[0] == pytest.approx(5.9, abs=0.2)
        assert run.losses[-1] < run.losses[0] - 1.0


def test_v2_gives_the_same_numbers_as_stock(runs: tuple[Run, Run]) -> None:
    baseline, v2 = runs
    assert v2.losses == pytest.approx(baseline.losses, rel=2e-6)
    assert v2.result["validation_loss"] == pytest.approx(baseline.result["validation_loss"], rel=2e-6)


def test_v2_holds_half_the_state_on_each_of_two_ranks(runs: tuple[Run, Run]) -> None:
    for run, share in zip(runs, ({"weight": 1.0, "gradient": 1.0}, {"weight": 0.5, "gradient": 0.5}), strict=True):
        measure = run.result["measure"]
        for part, fraction in {**share, "optimizer": 0.5}.items():
            held, plain = measure[f"{part}_bytes"], measure[f"plain_{part}_bytes"]
            assert fraction * plain * 0.99 < held < fraction * plain * 1.03, (run.result["kind"], part)


def test_the_collectives_of_a_step_are_counted(runs: tuple[Run, Run]) -> None:
    baseline, v2 = (run.result["measure"]["collectives_per_step"] for run in runs)
    assert (baseline["all-gather"], baseline["reduce-scatter"]) == (1, 1)
    units = 3  # two layers and the rest of the model
    assert v2["reduce-scatter"] == units
    assert units <= v2["all-gather"] <= 2 * units


def test_the_table_shows_both_runs_beside_plain_data_parallel(runs: tuple[Run, Run]) -> None:
    baseline, v2 = runs
    assert "CUDA is emulated" in v2.output
    assert "(earlier run)" not in baseline.output
    for text in ("v2", "(earlier run)", "(computed)", "state per rank", "steps per second", "all-gather per step"):
        assert text in v2.output
    assert "--baseline" in v2.output
    assert f"{v2.result['validation_loss']:.6f}" in v2.output


def test_ctrl_c_leaves_no_process(output: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--baseline", "--output", str(output), *SMALL, "--train-iters", "100000"],
        env=rank_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        descendants = wait_for_training(process, output)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, printed
    assert "Stopped" in printed
    assert len(descendants) >= 3
    assert_gone(descendants)


def wait_for_training(process: subprocess.Popen[str], output: Path) -> list[int]:
    """Process ids below ``process`` once its ranks are in the middle of training."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and process.poll() is None:
        logs = list(output.glob("*/ranks/*/attempt_0/1/stdout.log"))
        if any(" iteration        3/" in log.read_text() for log in logs):
            return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        time.sleep(0.2)
    raise AssertionError("training did not start")


def test_a_wrong_stock_flag_ends_with_its_message(output: Path) -> None:
    finished = run_command([*COMMAND, "--ranks", "1", "--output", str(output), "--train-iters", "many"], timeout=240)
    assert finished.returncode == 1
    assert "argument --train-iters: invalid int value: 'many'" in finished.output
    assert "Traceback" not in finished.output


def test_an_output_that_is_no_folder_and_a_taken_port_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finished = run_command([*COMMAND, "--output", str(tmp_path / "file")], timeout=60)
    assert finished.returncode == 1
    assert "--output names another folder" in finished.output
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        finished = run_command([*COMMAND, "--output", str(tmp_path), "--port", str(port)], timeout=60)
    assert finished.returncode == 1
    assert f"--port {port}: Address already in use" in finished.output
