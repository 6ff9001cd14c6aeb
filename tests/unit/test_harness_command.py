"""The command runner: output and status come back, a hang shows its stacks, nothing survives."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.harness.command import CommandTimedOut, run_command
from tests.unit.test_harness_spawn import assert_gone, pids_in

LAUNCHER = """
import subprocess, sys
workers = [subprocess.Popen([sys.executable, sys.argv[1], str(rank)], start_new_session=True) for rank in range(2)]
def wait_for_workers():
    while True:
        for worker in workers:
            try:
                if worker.wait(0.05):
                    [other.kill() for other in workers]
                    sys.exit(1)
            except subprocess.TimeoutExpired:
                pass
wait_for_workers()
"""

WORKER = """
import os, pathlib, sys, time
pathlib.Path(__file__).with_name(f"pid{sys.argv[1]}").write_text(str(os.getpid()))
def hang_as_0(): time.sleep(600)
def hang_as_1(): time.sleep(600)
globals()[f"hang_as_{sys.argv[1]}"]()
"""


def test_output_and_status_come_back() -> None:
    program = "import os, sys; print('out', os.environ['ADDED']); print('err', file=sys.stderr); sys.exit(3)"
    finished = run_command([sys.executable, "-c", program], env={"ADDED": "yes"}, timeout=60)
    assert finished.returncode == 3
    assert "out yes" in finished.output
    assert "err" in finished.output


def test_a_hanging_launcher_shows_the_stacks_of_every_worker(tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "worker.py").write_text(WORKER)
    with pytest.raises(CommandTimedOut) as failure:
        run_command([sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "worker.py")], timeout=6)
    for frame in ("in hang_as_0", "in hang_as_1", "in wait_for_workers"):
        assert frame in str(failure.value)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    assert len(pids) == 2
    assert_gone(pids)


def test_what_a_finished_command_left_behind_is_killed(tmp_path: Path) -> None:
    program = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
    )
    start = time.monotonic()
    assert run_command([sys.executable, "-c", program], timeout=60).returncode == 0
    assert time.monotonic() - start < 200
    assert_gone(pids_in(tmp_path))
