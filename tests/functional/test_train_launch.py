"""The demo's launcher on small ranks of its own: who failed is named, and no process stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from megatron_fsdp_v2_mcore.demo import launch

from tests.harness.spawn import rank_environment

STUBBORN_RANK = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(300)
"""
FAILING_RANK = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit("the reason of rank 1")
time.sleep(300)
"""
KILLED_RANK = """
import os, pathlib, signal, sys, time
said = pathlib.Path(__file__).with_name("said")
if os.environ["RANK"] == "0":
    while not said.exists():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
print("rank 1 says why", flush=True)
said.touch()
time.sleep(300)
"""


def command(folder: Path, program: str) -> list[str]:
    script = folder / "rank.py"
    script.write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    place = ["--master-addr", "127.0.0.1", "--master-port", str(launch.choose_port(0))]
    return [*torchrun, *place, "--redirects", "3", "--log-dir", str(folder / "ranks"), str(script)]


def run(folder: Path, program: str, on_line: object = lambda line: None) -> None:
    launch.run(command(folder, program), rank_environment(), folder, 2, on_line)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(pids) == []


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (FAILING_RANK, "Rank 1 failed with exit code 1. Last lines of rank 1:\nthe reason of rank 1"),
        (KILLED_RANK, "Rank 0 was ended by SIGKILL. Last lines of rank 1:\nrank 1 says why"),
    ],
    ids=["exit", "signal"],
)
def test_a_failed_rank_is_named_with_the_last_lines(tmp_path: Path, program: str, expected: str) -> None:
    with pytest.raises(launch.RunFailed) as failure:
        run(tmp_path, program)
    assert str(failure.value) == expected


def test_an_interrupt_ends_ranks_that_refuse_to_and_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
    pids: list[int] = []

    def interrupt_when_both_are_up(line: str) -> None:
        if line.startswith("pids"):
            pids.extend(int(pid) for pid in line.split()[1:])
        if len(pids) == 4:
            pids.extend(
                child.pid for child in psutil.Process().children() if "torch.distributed.run" in child.cmdline()
            )
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, STUBBORN_RANK, interrupt_when_both_are_up)
    assert len(pids) == 5
    assert_gone(pids)


def test_a_launcher_that_cannot_start_shows_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(launch.RunFailed, match=r"exit code 3. Its last lines:\nno such launcher"):
        launch.run(
            [sys.executable, "-c", "import sys; print('no such launcher'); sys.exit(3)"],
            dict(os.environ),
            tmp_path,
            2,
            lambda line: None,
        )


def test_a_usage_error_is_cut_to_its_last_line(tmp_path: Path) -> None:
    program = "import argparse; p = argparse.ArgumentParser(prog='x'); p.add_argument('-n', type=int); p.parse_args()"
    with pytest.raises(launch.RunFailed) as failure:
        launch.run_quietly([sys.executable, "-c", program, "-n", "abc"], dict(os.environ), tmp_path / "log")
    assert str(failure.value).endswith("Its last lines:\nx: error: argument -n: invalid int value: 'abc'")


def test_a_taken_port_is_refused_and_zero_finds_a_free_one() -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
            " print(s.getsockname()[1], flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        taken = int(holder.stdout.readline())
        with pytest.raises(OSError, match="in use"):
            launch.choose_port(taken)
        assert launch.choose_port(0) not in (0, taken)
    finally:
        holder.kill()
        holder.wait()
