"""The example trainers: both imports train alike through torchrun, and bad options are named."""

from __future__ import annotations

import importlib.util
import json
import resource
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.command import Finished, run_command
from tests.harness.spawn import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = ["language_model", "diffusion_transformer"]
SUPPORT = [path.stem for path in EXAMPLES.glob("*.py")]
PHASES = ["forward 1", "backward 1", "forward 2", "backward 2", "optimizer"]


def start(script: str, *options: str, ranks: int) -> Finished:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(EXAMPLES / f"{script}.py"), "--device", "cpu", *options]
    return run_command(command, timeout=300)


@pytest.mark.parametrize("script", SCRIPTS)
def test_both_imports_train_alike(script: str, tmp_path: Path) -> None:
    plot = ["--plot", str(tmp_path / "run.png")] if importlib.util.find_spec("matplotlib") else []
    before = cpu_seconds_of_children()
    finished = start(script, "--json", str(tmp_path / "run.json"), *plot, ranks=2)
    assert finished.returncode == 0, finished.output
    # On two cores that have nothing else to do this is under a minute; they may have something else to do.
    assert cpu_seconds_of_children() - before < 100
    assert finished.output.count("Largest relative difference of the losses") == 1
    if plot:
        assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "run.json").read_text())
    first, second = report["runs"]
    assert (first["name"], second["name"]) == ("FSDP2", "megatron_fsdp_v2")
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-5)
    for run in (first, second):
        assert len(run["losses"]) == len(run["seconds"]) == report["options"]["steps"]
        assert sum(run["losses"][-5:]) / 5 < 0.6 * run["losses"][0]
        check_memory(run["memory"])


def cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def check_memory(memory: dict[str, Any]) -> None:
    """A step climbs in every forward, comes down in every backward, and ends about where it began."""
    assert [phase["name"] for phase in memory["phases"]] == PHASES
    ends = [phase["samples"][-1] for phase in memory["phases"]]
    start = memory["phases"][0]["samples"][0]
    assert start < ends[0] > ends[1] < ends[2] > ends[3]
    assert memory["peak"] == max(max(phase["samples"]) for phase in memory["phases"])
    assert memory["peak"] > 1.5 * start
    assert 0.8 * start < ends[4] < 1.2 * start


def test_one_process_trains_in_bfloat16_with_recomputation(tmp_path: Path) -> None:
    options = ["--fsdp", "v2", "--steps", "3", "--bf16", "--checkpoint", "--json", str(tmp_path / "run.json")]
    finished = start("diffusion_transformer", *options, ranks=1)
    assert finished.returncode == 0, finished.output
    assert "difference" not in finished.output
    (run,) = json.loads((tmp_path / "run.json").read_text())["runs"]
    assert run["name"] == "megatron_fsdp_v2"
    assert [phase["name"] for phase in run["memory"]["phases"]] == PHASES


def test_ranks_report_a_bad_option_once() -> None:
    finished = start("language_model", "--width", "100", ranks=2)
    assert finished.returncode == 1
    assert finished.output.count("100 is no multiple of 32") == 1


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """In this process, because a start of its own for every case takes seconds."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("COLUMNS", "200")
    yield monkeypatch
    for name in SUPPORT:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fsdp", "three"], "'three' is not one of"),
        (["--steps", "1"], "2"),
        (["--width", "100"], "100 is no multiple of 32"),
        (["--lr", "0"], "0.0 is no positive number"),
        (["--max-norm", "nan"], "nan is no positive number"),
        (["--device", "cuda"], "1 ranks need as many GPUs, there are 0"),
        (["--plot", "run.jpg"], "run.jpg doesn't end in .png"),
        (["--plot", "run.png"], "needs matplotlib; install it"),
        (["--json", "/no/such/folder/run.json"], "there is no folder /no/such/folder"),
    ],
)
def test_a_bad_option_is_named(
    options: list[str], message: str, command_line: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command_line.setitem(sys.modules, "matplotlib", None)
    command_line.setattr("torch.cuda.is_available", lambda: False)
    command_line.setattr(sys, "argv", ["language_model.py", *options])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / "language_model.py"), run_name="__main__")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert options[0] in said
    assert message in said
