"""Runs test functions on real rank processes.

`run_ranks(fn, 2, *args)` is the plain way. Tests that have many cases take the session fixture instead:
`ranks(2).run(fn, *args)` shares one interpreter start and one torch import between all of them. Either way each
case runs in freshly forked rank processes with a new default process group, so nothing of one case (groups,
device meshes, DTensor's caches, random state, patches, environment variables) reaches the next.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.harness.rank import rank_file, read_result
from tests.harness.server import Case, RankOutcome

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_TIMEOUT = 120.0
# What the server may need beyond the case itself: its start, the module's imports, the stack dump.
_SERVER_MARGIN = 180.0
_LOG_TAIL = 4000


class RanksFailed(RuntimeError):
    """A rank raised or died. `outcomes` holds one `RankOutcome` per rank, the first failures first."""

    def __init__(self, message: str, outcomes: list[RankOutcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


class RanksTimedOut(RanksFailed):
    """The case didn't end in time; the message holds every live rank's Python stacks."""


class RankServer:
    """Starts the fork server at the first case, and again after it was closed or lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._work_dir: Path | None = None
        self._cases = 0

    @property
    def pid(self) -> int | None:
        """Process id of the running server, None when there is none."""
        return self._process.pid if self._process else None

    def run(self, fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
        """Runs `fn(rank, world_size, *args)` on every rank and returns the results in rank order.

        `fn` is a top-level function of an importable module; `args` and the results are pickled. `timeout` is in
        seconds. Raises `RanksFailed` or `RanksTimedOut`; no rank is alive afterwards in any case.
        """
        call = pickle.dumps((fn, args))
        try:
            connection, work_dir = self._ensure_started()
            case_dir = work_dir / f"case{self._cases}"
            self._cases += 1
            case_dir.mkdir()
            case = Case(call, fn.__module__, world_size, timeout, case_dir)
            reply = self._exchange(connection, case)
        except BaseException:
            self.close()
            raise
        if isinstance(reply, str):
            self.close()
            raise RanksFailed(f"{fn.__qualname__} could not be started on the ranks:\n{reply}", [])
        try:
            return _results(fn, case_dir, reply, timeout)
        finally:
            shutil.rmtree(case_dir, ignore_errors=True)

    def close(self) -> None:
        """Ends the server and every rank below it. Harmless when nothing runs."""
        if self._connection:
            self._connection.close()
        if self._process:
            # On SIGTERM it kills its ranks first; ranks also die with it should it have to be killed.
            self._process.terminate()
            try:
                self._process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        if self._work_dir:
            shutil.rmtree(self._work_dir, ignore_errors=True)
        self._process = self._connection = self._work_dir = None

    def _ensure_started(self) -> tuple[Connection, Path]:
        if self._process and self._process.poll() is not None:
            self.close()
        if self._connection is None or self._work_dir is None:
            self._work_dir = Path(tempfile.mkdtemp(prefix="ranks-"))
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.harness.server", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    cwd=ROOT,
                    env=rank_environment(),
                    # Ctrl-C goes to pytest alone, which then ends the server in order.
                    start_new_session=True,
                )
            self._connection = Connection(ours.detach())
            self._connection.send_bytes(pickle.dumps(sys.path))
        return self._connection, self._work_dir

    def _exchange(self, connection: Connection, case: Case) -> list[RankOutcome] | str:
        connection.send_bytes(pickle.dumps(case))
        if not connection.poll(case.timeout + _SERVER_MARGIN):
            raise RanksTimedOut(f"no answer from the rank server {_SERVER_MARGIN:.0f} s after the timeout", [])
        reply: list[RankOutcome] | str = pickle.loads(connection.recv_bytes())
        return reply


class RankPool:
    """`world_size` ranks on a server that other pools may share."""

    def __init__(self, world_size: int, server: RankServer) -> None:
        self.world_size = world_size
        self._server = server

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
        """As `RankServer.run`, with this pool's world size."""
        return self._server.run(fn, self.world_size, *args, timeout=timeout)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
    """As `RankServer.run`, on a server of its own that ends with the case."""
    server = RankServer()
    try:
        return server.run(fn, world_size, *args, timeout=timeout)
    finally:
        server.close()


def rank_environment() -> dict[str, str]:
    """The environment of rank processes: one compute thread each, gloo on the loopback device, crashes with stacks."""
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {**os.environ, **single, "GLOO_SOCKET_IFNAME": loopback, "PYTHONFAULTHANDLER": "1"}


def _results(fn: Callable[..., Any], case_dir: Path, outcomes: list[RankOutcome], timeout: float) -> list[Any]:
    for outcome in outcomes:
        if log := _log(case_dir, outcome.rank):
            print(f"--- output of rank {outcome.rank}\n{log}")
    if all(outcome.status == "ok" for outcome in outcomes):
        return [read_result(case_dir, rank) for rank in range(len(outcomes))]
    parts = [f"--- rank {outcome.rank}: {outcome.status}\n{outcome.detail}" for outcome in outcomes]
    for outcome in outcomes:
        if outcome.status == "died" and (log := _log(case_dir, outcome.rank)):
            parts.append(f"--- last output of rank {outcome.rank}\n{log[-_LOG_TAIL:]}")
    text = "\n".join(parts)
    if any(outcome.status == "timeout" for outcome in outcomes):
        raise RanksTimedOut(f"{fn.__qualname__} did not end within {timeout} s\n{text}", outcomes)
    raise RanksFailed(f"{fn.__qualname__} failed\n{text}", outcomes)


def _log(case_dir: Path, rank: int) -> str:
    path = rank_file(case_dir, rank, "log")
    return path.read_text(errors="replace") if path.exists() else ""
