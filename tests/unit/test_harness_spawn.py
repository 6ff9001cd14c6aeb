"""The spawn harness: results come back, failures and hangs show, nothing survives."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.harness.spawn import ROOT, RankPool, RanksFailed, RanksTimedOut, run_ranks

Ranks = Callable[[int], RankPool]


def summed_rank(rank: int, world_size: int, offset: float) -> dict[str, object]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return {"rank": rank, "world": dist.get_world_size(), "total": total, "threads": torch.get_num_threads()}


def fail_on_last(rank: int, world_size: int, pid_dir: str) -> None:
    Path(pid_dir, str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == world_size - 1:
        raise ValueError(f"rank {rank} says no")
    time.sleep(600)


def hang_in_different_places(rank: int, world_size: int, pid_dir: str) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    Path(pid_dir, str(rank)).write_text(str(os.getpid()))
    Path(pid_dir, f"{rank}-child").write_text(str(sleeper.pid))
    if rank == 0:
        wait_in_a_collective()
    sleep_on_the_host()


def wait_in_a_collective() -> None:
    dist.all_reduce(torch.zeros(1))


def sleep_on_the_host() -> None:
    time.sleep(600)


def die_by_signal(rank: int, world_size: int) -> None:
    print(f"last words of rank {rank}", flush=True)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def leave_traces(rank: int, world_size: int) -> None:
    dist.new_group([0])
    init_device_mesh("cpu", (1, world_size))
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank + 5)
    os.environ["LEFT_BEHIND"] = "1"
    sys.modules["left_behind"] = sys


def look_for_traces(rank: int, world_size: int) -> tuple[str | None, bool, torch.dtype, int, int]:
    mesh = init_device_mesh("cpu", (world_size,))
    return (
        os.environ.get("LEFT_BEHIND"),
        "left_behind" in sys.modules,
        torch.get_default_dtype(),
        torch.initial_seed(),
        mesh.size(),
    )


def one_rank_skips_a_collective(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.zeros(3), async_op=True)


def pids_in(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.iterdir()]


def assert_gone(pids: list[int]) -> None:
    assert pids
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(is_running(pid) for pid in pids):
        time.sleep(0.05)
    assert [pid for pid in pids if is_running(pid)] == []


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order(ranks: Ranks, world_size: int) -> None:
    results = ranks(world_size).run(summed_rank, 0.5)
    assert [result["rank"] for result in results] == list(range(world_size))
    for result in results:
        assert result["world"] == world_size
        assert result["threads"] == 1
        assert result["total"].item() == sum(range(world_size)) + 0.5 * world_size


def test_run_ranks_works_without_a_pool() -> None:
    assert [result["total"].item() for result in run_ranks(summed_rank, 2, 0.0)] == [1.0, 1.0]


def test_an_exception_surfaces_and_the_others_are_killed_at_once(ranks: Ranks, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"ValueError: rank 2 says no") as failure:
        ranks(3).run(fail_on_last, str(tmp_path))
    assert time.monotonic() - start < 200
    assert "fail_on_last" in str(failure.value)
    assert [outcome.rank for outcome in failure.value.outcomes] == [2, 0, 1]
    assert [outcome.status for outcome in failure.value.outcomes] == ["error", "killed", "killed"]
    assert_gone(pids_in(tmp_path))


def test_a_hang_is_killed_and_every_rank_shows_its_stack(ranks: Ranks, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RanksTimedOut, match="did not end within 6 s") as failure:
        ranks(2).run(hang_in_different_places, str(tmp_path), timeout=6)
    assert time.monotonic() - start < 200
    stacks = {outcome.rank: outcome.detail for outcome in failure.value.outcomes}
    assert "in wait_in_a_collective" in stacks[0]
    assert "in sleep_on_the_host" in stacks[1]
    assert all(detail in str(failure.value) for detail in stacks.values())
    assert_gone(pids_in(tmp_path))


def test_a_rank_that_dies_is_named_with_its_output(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0: died\nended by signal SIGSEGV") as failure:
        ranks(2).run(die_by_signal)
    assert "last words of rank 0" in str(failure.value)


def test_a_collective_that_one_rank_skipped_does_not_pass(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed):
        ranks(2).run(one_rank_skips_a_collective, timeout=6)


def test_a_case_after_a_failure_is_unaffected(ranks: Ranks, tmp_path: Path) -> None:
    pool = ranks(2)
    with pytest.raises(RanksFailed):
        pool.run(fail_on_last, str(tmp_path))
    assert pool.run(summed_rank, 0.0)[0]["total"].item() == 1.0


def test_a_case_sees_nothing_of_the_one_before(ranks: Ranks) -> None:
    pool = ranks(2)
    pool.run(leave_traces)
    assert pool.run(look_for_traces) == [(None, False, torch.float32, 0, 2)] * 2


def test_many_cases_share_one_start(ranks: Ranks) -> None:
    pool = ranks(2)
    pool.run(summed_rank, 0.0)
    before = pool._server.pid
    start = time.monotonic()
    for _ in range(5):
        pool.run(summed_rank, 0.0)
    assert time.monotonic() - start < 100
    assert pool._server.pid == before


def test_an_unpicklable_result_is_an_error_of_its_rank(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"rank 0: error[\s\S]*pickle"):
        ranks(1).run(returns_a_lambda)


def returns_a_lambda(rank: int, world_size: int) -> Callable[[], None]:
    return lambda: None


def test_a_module_that_starts_threads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "def case(rank, world_size): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    case = importlib.import_module("starts_a_thread").case
    with pytest.raises(RanksFailed, match="importing starts_a_thread started threads"):
        run_ranks(case, 1)


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_session_leaves_no_orphans(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, sig: signal.Signals
) -> None:
    # A killed session can't remove its work folder.
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("work"))}
    program = (
        "from tests.harness.spawn import run_ranks\n"
        "from tests.unit.test_harness_spawn import hang_in_different_places as hang\n"
        f"run_ranks(hang, 2, {str(tmp_path)!r}, timeout=300)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL, env=environment)
    try:
        deadline = time.monotonic() + 200
        while len([path for path in tmp_path.iterdir() if path.read_text()]) < 4 and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = [*pids_in(tmp_path), *(child.pid for child in psutil.Process(driver.pid).children(recursive=True))]
        assert len(pids) >= 5
        driver.send_signal(sig)
        driver.wait(timeout=100)
        assert_gone(pids)
    finally:
        driver.kill()
        driver.wait()
