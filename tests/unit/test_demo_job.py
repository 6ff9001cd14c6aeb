"""Flags, command line and environment of a demo run."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_fsdp_v2_mcore.bootstrap import ENV_CPU_EMULATION
from megatron_fsdp_v2_mcore.demo import corpus, job

TEXT = corpus.Corpus(Path("/data/train"), Path("/data/validation"), 100, 10)
CPU_JOB = job.Job(ranks=2, on_gpu=False, baseline=False)
GPU_JOB = job.Job(ranks=8, on_gpu=True, baseline=False)


def last_value(flags: list[str], name: str) -> str:
    """What argparse would take: the value after the last occurrence."""
    return flags[len(flags) - 1 - flags[::-1].index(name) + 1]


def test_v2_is_zero_3_and_the_baseline_is_stocks_distributed_optimizer() -> None:
    v2 = job.flags(CPU_JOB, TEXT)
    assert "--use-megatron-fsdp-v2" in v2
    assert last_value(v2, "--data-parallel-sharding-strategy") == "optim_grads_params"
    baseline = job.flags(job.Job(2, False, True), TEXT)
    assert "--use-distributed-optimizer" in baseline
    assert not [flag for flag in baseline if "fsdp" in flag or "sharding" in flag]
    only_sharing = set(v2) ^ set(baseline)
    assert only_sharing == {*job.V2_FLAGS, *job.BASELINE_FLAGS}


def test_the_users_flags_win() -> None:
    users = ["--train-iters", "20", "--data-parallel-sharding-strategy", "optim"]
    flags = job.flags(job.Job(2, False, False, users), TEXT)
    assert last_value(flags, "--train-iters") == "20"
    assert last_value(flags, "--data-parallel-sharding-strategy") == "optim"


@pytest.mark.parametrize(("ranks", "micro", "whole"), [(1, 16, 16), (2, 8, 16), (3, 5, 15), (8, 2, 16), (64, 1, 64)])
def test_the_batch_divides_among_any_number_of_ranks(ranks: int, micro: int, whole: int) -> None:
    flags = job.flags(job.Job(ranks, False, False), TEXT)
    assert last_value(flags, "--micro-batch-size") == str(micro)
    assert last_value(flags, "--global-batch-size") == str(whole)


def test_the_device_decides_backend_and_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_CPU_EMULATION, raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert last_value(job.flags(CPU_JOB, TEXT), "--distributed-backend") == "gloo"
    assert last_value(job.flags(GPU_JOB, TEXT), "--distributed-backend") == "nccl"
    assert job.environment(CPU_JOB, "lo")[ENV_CPU_EMULATION] == "1"
    assert job.environment(CPU_JOB, "lo")["GLOO_SOCKET_IFNAME"] == "lo"
    assert ENV_CPU_EMULATION not in job.environment(GPU_JOB, "lo")
    assert "GLOO_SOCKET_IFNAME" not in job.environment(GPU_JOB, "lo")


def test_the_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    env = job.environment(CPU_JOB, "lo")
    assert (env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"]) == ("3", "eth7")


def test_torchrun_starts_the_measured_script_with_the_flags_last(tmp_path: Path) -> None:
    line = job.command(CPU_JOB, TEXT, tmp_path, port=4711)
    assert line[1:3] == ["-m", "torch.distributed.run"]
    assert last_value(line, "--nproc-per-node") == "2"
    assert last_value(line, "--master-port") == "4711"
    flags = job.flags(CPU_JOB, TEXT)
    *_, module, measured, script = line[: -len(flags)]
    assert module.endswith("demo.measure")
    assert Path(measured).parent == tmp_path
    assert Path(script).is_file()
    assert line[-len(flags) :] == flags
