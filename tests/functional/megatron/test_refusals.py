"""A script started with settings that can't be honoured ends before it looks for other ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.functional.megatron.cases import Case
from tests.harness.command import Finished, run_command

SCRIPT = Path(__file__).with_name("script.py")
REFUSED = Case("refused", ("--use-megatron-fsdp-v2", "--async-save", "--use-nccl-ub", "--optimizer", "muon"))


def _run_one_rank_of_two(rank: int) -> Finished:
    """The other rank isn't started, so a process group could never form."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "PYTHONPATH": str(SCRIPT.parents[3]),
        "MEGATRON_FSDP_V2_CPU_EMULATION": "1",
    }
    return run_command([sys.executable, str(SCRIPT), *REFUSED.argv(2)], timeout=200, env=environment)


@pytest.mark.parametrize("rank", [0, 1])
def test_refused_settings_end_every_rank_alike_and_rank_zero_says_why(rank: int) -> None:
    ended = _run_one_rank_of_two(rank)
    assert ended.returncode == 2, ended.output
    assert "Traceback" not in ended.output
    lines = [line for line in ended.output.splitlines() if line.startswith("megatron_fsdp_v2: --")]
    expected = ["--use-nccl-ub", "--optimizer", "--async-save"] if rank == 0 else []
    assert [line.split()[1] for line in lines] == expected
