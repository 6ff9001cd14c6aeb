"""Runs a function on rank processes of its own and passes on what they report."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# A rank that died leaves the others in a collective; seconds until they give up on their own.
_COLLECTIVE_TIMEOUT = 120

Tell = Callable[[str], None]


class RankFailed(RuntimeError):
    """A rank raised or died; the message holds its traceback."""


def run_on_ranks(
    fn: Callable[..., Any], processes: int, world_size: int, backend: str, tell: Tell, *args: Any
) -> list[Any]:
    """Run ``fn(tell, *args)`` in ``processes`` processes of a new group; their results in rank order.

    ``tell`` gets what rank 0 tells, in this process. With the backend ``fake`` one process may stand for a whole group.

    Raises:
        RankFailed: a rank didn't return.
    """
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, backend, folder, messages, fn, args), daemon=True)
            for rank in range(processes)
        ]
        try:
            for process in ranks:
                process.start()
            return _collect(ranks, messages, tell)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(ranks: Sequence[BaseProcess], messages: Any, tell: Tell) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        try:
            rank, kind, value = messages.get(timeout=1)
        except queue.Empty:
            for rank, process in enumerate(ranks):
                if rank not in results and process.exitcode is not None:
                    raise RankFailed(f"rank {rank} died with exit code {process.exitcode}") from None
            continue
        if kind == "error":
            raise RankFailed(f"rank {rank} failed:\n{value}")
        if kind == "result":
            results[rank] = value
        else:
            tell(value)
    return [results[rank] for rank in range(len(ranks))]


def _rank(
    rank: int, world_size: int, backend: str, folder: str, messages: Any, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        # One thread per rank, as many ranks as cores: what one side waits for isn't hidden by the other's threads.
        torch.set_num_threads(1)
        _init_group(rank, world_size, backend, Path(folder) / "store")
        result = fn((lambda text: messages.put((0, "progress", text))) if rank == 0 else _silent, *args)
        dist.barrier()
        messages.put((rank, "result", result))
        dist.destroy_process_group()
    except BaseException:
        messages.put((rank, "error", traceback.format_exc()))


def _init_group(rank: int, world_size: int, backend: str, store: Path) -> None:
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    timeout = timedelta(seconds=_COLLECTIVE_TIMEOUT)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)


def _silent(text: str) -> None:
    pass
