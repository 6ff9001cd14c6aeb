"""Runs a whole command (a script, torchrun) as a test: its output comes back, and nothing of it survives."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.harness.spawn import ROOT, rank_environment

_DUMP_SECONDS = 3.0


@dataclass(frozen=True)
class Finished:
    """Exit status (negative: the signal's number) and the joined standard output and error of a command."""

    returncode: int
    output: str
    seconds: float


class CommandTimedOut(RuntimeError):
    """The command didn't end in time; the message holds its output and every Python process's stacks."""


def run_command(
    command: Sequence[str], *, timeout: float = 300.0, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Finished:
    """Runs `command` with one compute thread per process and `env` added to the environment.

    After `timeout` seconds every process below it has its Python stacks dumped and is killed, and
    `CommandTimedOut` is raised. Processes that the command left behind are killed as well.
    """
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            list(command),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            env={**rank_environment(), **(env or {})},
            start_new_session=True,
        )
        in_time = True
        try:
            in_time = _wait(process, start + timeout)
            if not in_time:
                _dump_and_kill(process)
        finally:
            _kill_tree(process)
        log.seek(0)
        output = log.read()
    if not in_time:
        raise CommandTimedOut(f"{' '.join(command)}\ndid not end within {timeout} s; output and stacks:\n{output}")
    return Finished(process.returncode, output, time.monotonic() - start)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
        return found
    return []


def _dump_and_kill(process: subprocess.Popen[bytes]) -> None:
    """With PYTHONFAULTHANDLER set, SIGABRT makes Python write the stacks of all its threads and end."""
    # A launcher that is awake would end the other workers as soon as the first one is gone.
    process.send_signal(signal.SIGSTOP)
    for child in _descendants(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGABRT)
            _wait_until_ended(child)
    process.send_signal(signal.SIGABRT)
    process.send_signal(signal.SIGCONT)
    _wait(process, time.monotonic() + _DUMP_SECONDS)


def _wait_until_ended(child: psutil.Process) -> None:
    deadline = time.monotonic() + _DUMP_SECONDS
    while time.monotonic() < deadline and child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    for child in _descendants(process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
