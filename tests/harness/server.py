"""The process that has torch imported already and forks the ranks of every case.

Run as `python -m tests.harness.server FD`. It stays single-threaded and never creates a process group, a
tensor or a random number itself: each rank is a fresh fork of that state, so no case can see another one.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Literal, NoReturn

# Imported for the ranks: a fork has them for free.
import torch.distributed.tensor  # noqa: F401

from tests.harness.rank import die_with_parent, rank_file, run_rank


@dataclass(frozen=True)
class Case:
    """One function to run on `world_size` ranks. `call` is the pickled `(fn, args)`, `timeout` is in seconds."""

    call: bytes
    module: str
    world_size: int
    timeout: float
    case_dir: Path


@dataclass(frozen=True)
class RankOutcome:
    """How a rank ended: `ok`, `error` (it raised), `died` (a signal or an exit), `killed` (another one failed) or
    `timeout`. `detail` holds the traceback, the reason or the stacks."""

    rank: int
    status: Literal["ok", "error", "died", "killed", "timeout"]
    detail: str = ""


def run_case(case: Case) -> list[RankOutcome]:
    """Forks the ranks, waits for them, and leaves none of them alive. Failed ranks come in the order they failed."""
    importlib.import_module(case.module)
    if _thread_count() > 1:
        raise RuntimeError(f"importing {case.module} started threads; a forked rank would inherit their locks")
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(target=run_rank, args=(case.case_dir, rank, case.world_size, case.call))
        for rank in range(case.world_size)
    ]
    try:
        for rank in ranks:
            rank.start()
        failed_first, timed_out = _wait_for_ranks(ranks, case.timeout)
        if timed_out:
            _dump_stacks(case.case_dir, ranks)
        alive = {rank for rank, process in enumerate(ranks) if process.is_alive()}
    finally:
        _kill(ranks)
    outcomes = [_outcome(case.case_dir, rank, process, rank in alive, timed_out) for rank, process in enumerate(ranks)]
    return sorted(outcomes, key=lambda outcome: (outcome.rank not in failed_first, outcome.rank))


def _thread_count() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def _wait_for_ranks(ranks: list[ForkProcess], timeout: float) -> tuple[set[int], bool]:
    """Returns once all ranks ended well, or some failed (which ones), or the time is up (True)."""
    deadline = time.monotonic() + timeout
    pending = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while pending:
        ended = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            return set(), True
        done = {rank for sentinel, rank in pending.items() if sentinel in ended}
        pending = {sentinel: rank for sentinel, rank in pending.items() if rank not in done}
        for rank in done:
            ranks[rank].join()
        failed = {rank for rank in done if ranks[rank].exitcode != 0}
        if failed:
            return failed, False
    return set(), False


def _dump_stacks(case_dir: Path, ranks: list[ForkProcess]) -> None:
    waiting = []
    for rank, process in enumerate(ranks):
        if process.is_alive() and process.pid:
            os.kill(process.pid, signal.SIGUSR1)
            waiting.append(rank_file(case_dir, rank, "stacks"))
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and not all(path.exists() and path.stat().st_size for path in waiting):
        time.sleep(0.05)
    time.sleep(0.2)


def _kill(ranks: list[ForkProcess]) -> None:
    for process in ranks:
        if process.pid is None:
            continue
        # The group may still hold what the case started, even when the rank itself has ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if process.is_alive():
            process.kill()
        process.join()


def _outcome(case_dir: Path, rank: int, process: ForkProcess, was_alive: bool, timed_out: bool) -> RankOutcome:
    if was_alive and timed_out:
        stacks = rank_file(case_dir, rank, "stacks")
        return RankOutcome(rank, "timeout", (stacks.read_text() if stacks.exists() else "") or "no stack was written")
    if process.exitcode == 0:
        return RankOutcome(rank, "ok")
    result = rank_file(case_dir, rank, "result")
    if process.exitcode == 1 and result.exists():
        return RankOutcome(rank, "error", result.read_text())
    if was_alive:
        return RankOutcome(rank, "killed", "killed because another rank failed")
    code = process.exitcode or 0
    reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return RankOutcome(rank, "died", f"ended by {reason} without a result")


def _stop(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def main(descriptor: int) -> None:
    """Serves cases until the other end of the connection is closed."""
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _stop)
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    sys.path[:] = pickle.loads(connection.recv_bytes())
    while True:
        try:
            case: Case = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        reply: list[RankOutcome] | str
        try:
            reply = run_case(case)
        except Exception:
            reply = traceback.format_exc()
        connection.send_bytes(pickle.dumps(reply))


if __name__ == "__main__":
    # Pickled dataclasses must name the importable module, not `__main__`.
    from tests.harness.server import main as serve

    serve(int(sys.argv[1]))
