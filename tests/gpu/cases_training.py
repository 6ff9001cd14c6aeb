"""Rank functions of the GPU tests: training over NCCL beside a one-process reference."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import FSDPModule, MixedPrecisionPolicy, clip_grad_norm_, full_tensor, fully_shard
from megatron_fsdp_v2.sharding import collectives
from tests.functional.core.cases_support import Net

WIDTH = 256


class Mlp(nn.Module):
    """Layers big enough that a gather or reduction takes longer than the host needs to issue it."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@contextmanager
def nccl(rank: int, world: int, port: int) -> Iterator[torch.device]:
    """An NCCL group in place of the harness's gloo group; one GPU per rank."""
    dist.destroy_process_group()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    # The reference is exact fp32 on the same device.
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, device_id=device
    )
    yield device
    dist.destroy_process_group()


def trains_as_one_process(rank: int, world: int, port: int, strategy: str) -> None:
    with nccl(rank, world, port) as device:
        torch.manual_seed(0)
        reference = Net().to(device)
        net = copy.deepcopy(reference)
        for layer in net.layers:
            fully_shard(layer, strategy=strategy)
        fully_shard(net, strategy=strategy)
        _train(rank, world, net, reference, (5,))


def trains_with_slow_communication(rank: int, world: int, port: int, strategy: str) -> None:
    """Every collective starts late on its stream, so that a missing event shows as wrong numbers."""
    with nccl(rank, world, port) as device:
        torch.manual_seed(0)
        reference = Mlp().to(device)
        net = copy.deepcopy(reference)
        for layer in net.layers:
            fully_shard(layer, strategy=strategy)
        fully_shard(net, strategy=strategy)
        with _delayed_collectives():
            _train(rank, world, net, reference, (WIDTH,))


def frees_gathered_weights(rank: int, world: int, port: int) -> None:
    with nccl(rank, world, port) as device:
        net = Mlp(layers=8).to(device)
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
        batch = torch.randn(2, WIDTH, device=device)
        net(batch).sum().backward()
        net.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.no_grad():
            net(batch)
        torch.cuda.synchronize()
        layer_bytes = (WIDTH * WIDTH + WIDTH) * 4
        gathered = torch.cuda.max_memory_allocated() - before
        # The running layer, the one gathered ahead, and a little for activations.
        assert gathered < 2.5 * layer_bytes, (gathered, layer_bytes)
        assert torch.cuda.memory_allocated() - before < layer_bytes // 2


def computes_in_bf16(rank: int, world: int, port: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_grads_dtype=torch.float32)
    with nccl(rank, world, port) as device:
        torch.manual_seed(0)
        net = Mlp().to(device)
        for layer in net.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        batch = torch.randn(8, WIDTH, device=device)
        losses = []
        for _ in range(10):
            loss = (net(batch).float() - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert all(param.dtype == torch.float32 for param in net.parameters())


def shards_over_two_axes(rank: int, world: int, port: int, outer_strategy: str) -> None:
    with nccl(rank, world, port) as device:
        mesh = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("outer", "shard"))
        torch.manual_seed(0)
        reference = Net().to(device)
        net = copy.deepcopy(reference)
        for layer in net.layers:
            fully_shard(layer, mesh=mesh, outer_strategy=outer_strategy)
        fully_shard(net, mesh=mesh, outer_strategy=outer_strategy)
        _train(rank, world, net, reference, (5,))


def _train(rank: int, world: int, net: nn.Module, reference: nn.Module, shape: tuple[int, ...]) -> None:
    device = next(reference.parameters()).device
    assert isinstance(net, FSDPModule)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in range(10):
        for micro_batch in range(3):
            generator = torch.Generator().manual_seed(10 * step + micro_batch)
            batch = torch.randn(world, 4, *shape, generator=generator).to(device)
            net(batch[rank]).pow(2).mean().backward()
            reference(batch).pow(2).mean().backward()
        norm = clip_grad_norm_(net.parameters(), 1.0)
        expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-4, atol=1e-5)
        for one in (optimizer, expected):
            one.step()
            one.zero_grad()
    for (name, param), (_, wanted) in zip(net.named_parameters(), reference.named_parameters(), strict=True):
        whole = full_tensor(param)
        assert torch.allclose(whole, wanted, rtol=1e-3, atol=1e-4), (name, (whole - wanted).abs().max())


@contextmanager
def _delayed_collectives() -> Iterator[None]:
    """Have the stream a collective is issued on sleep about a millisecond first."""
    originals = {name: getattr(collectives, name) for name in ("_all_gather", "_reduce_scatter")}

    def late(original: object) -> object:
        def call(*args: object, **kwargs: object) -> object:
            torch.cuda._sleep(2_000_000)
            return original(*args, **kwargs)  # type: ignore[operator]

        return call

    for name, original in originals.items():
        setattr(collectives, name, late(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(collectives, name, original)
