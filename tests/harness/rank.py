"""What one rank process does: set itself up, run one case, leave its result in a file."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def die_with_parent(sig: int) -> None:
    """Asks the kernel to send `sig` to this process when its parent ends (Linux only; elsewhere a no-op)."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, sig, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def rank_file(case_dir: Path, rank: int, kind: str) -> Path:
    """Path of a rank's `result`, `stacks` or `log` file."""
    return case_dir / f"rank{rank}.{kind}"


def run_rank(case_dir: Path, rank: int, world_size: int, call: bytes) -> None:
    """Body of a rank process: runs the pickled `(fn, args)` inside a fresh gloo group, then exits 0 or 1."""
    # A group of its own lets the server kill the rank together with whatever the case started.
    os.setpgrp()
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stacks = rank_file(case_dir, rank, "stacks").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _redirect_output(rank_file(case_dir, rank, "log"))
    result = rank_file(case_dir, rank, "result")
    try:
        answer = _run_in_group(case_dir, rank, world_size, call)
        result.write_bytes(answer)
    except BaseException:
        result.write_text(traceback.format_exc())
        # No orderly shutdown: the other ranks may sit in a collective that can't finish any more.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _run_in_group(case_dir: Path, rank: int, world_size: int, call: bytes) -> bytes:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{case_dir}/store", rank=rank, world_size=world_size)
    fn, args = pickle.loads(call)
    answer = pickle.dumps(fn(rank, world_size, *args))
    if dist.is_initialized():
        # A rank that left early would look like a network failure to the others, and a collective
        # that only some ranks issued has to show here rather than in the next case.
        dist.barrier()
        dist.destroy_process_group()
    return answer


def _redirect_output(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)


def read_result(case_dir: Path, rank: int) -> Any:
    """The value a successful rank returned."""
    return pickle.loads(rank_file(case_dir, rank, "result").read_bytes())
