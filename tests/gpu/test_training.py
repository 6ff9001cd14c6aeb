"""Training on GPUs over NCCL: numbers, streams and memory. One rank per GPU, four at most."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
import torch

from megatron_fsdp_v2.strategy import SHARD_STRATEGIES
from tests.gpu import cases_training as cases
from tests.harness.spawn import RankPool

Ranks = Callable[[int], RankPool]
WORLD = min(4, max(1, torch.cuda.device_count()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("strategy", SHARD_STRATEGIES)
def test_trains_as_one_process(ranks: Ranks, strategy: str) -> None:
    ranks(WORLD).run(cases.trains_as_one_process, _free_port(), strategy)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_waits_for_slow_communication(ranks: Ranks, strategy: str) -> None:
    ranks(WORLD).run(cases.trains_with_slow_communication, _free_port(), strategy)


def test_frees_gathered_weights(ranks: Ranks) -> None:
    ranks(WORLD).run(cases.frees_gathered_weights, _free_port())


def test_computes_in_bf16(ranks: Ranks) -> None:
    ranks(WORLD).run(cases.computes_in_bf16, _free_port())


@pytest.mark.skipif(WORLD < 4, reason="needs 4 GPUs for a 2x2 mesh")
@pytest.mark.parametrize("outer_strategy", ["no_shard", "optim"])
def test_shards_over_two_axes(ranks: Ranks, outer_strategy: str) -> None:
    ranks(WORLD).run(cases.shards_over_two_axes, _free_port(), outer_strategy)
