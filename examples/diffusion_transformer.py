"""Trains a small diffusion transformer on handwritten digits, sharded by FSDP2 and by megatron_fsdp_v2 in turn.

torchrun --nproc-per-node 2 examples/diffusion_transformer.py --help
"""

import gzip
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import Meter, Options, command, cosine_with_warmup
from layers import Attention, FeedForward
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

DIGITS = Path(__file__).with_name("data") / "digits.csv.gz"
SIZE, PATCH, CLASSES = 8, 2, 10
TOKENS = (SIZE // PATCH) ** 2
DEFAULTS = Options(steps=30, batch=16, layers=3, width=128, lr=2e-3)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale) + shift


class Modulation(nn.Sequential):
    """``parts`` tensors (batch, 1, width) from the condition (batch, width); zero until trained (adaLN-zero)."""

    def __init__(self, width: int, parts: int) -> None:
        super().__init__(nn.SiLU(), nn.Linear(width, parts * width), nn.Unflatten(1, (parts, 1, width)))
        nn.init.zeros_(self[1].weight)
        nn.init.zeros_(self[1].bias)


class Block(nn.Module):
    def __init__(self, width: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention, self.feed_forward = Attention(width, causal=False), FeedForward(width)
        self.modulation = Modulation(width, parts=6)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self.compute, x, condition, use_reentrant=False)
        return self.compute(x, condition)

    def compute(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition).unbind(1)
        x = x + gate_1 * self.attention(modulate(self.norm(x), shift_1, scale_1))
        return x + gate_2 * self.feed_forward(modulate(self.norm(x), shift_2, scale_2))


class DiffusionTransformer(nn.Module):
    """Velocity of images, both (batch, SIZE, SIZE), at the times (batch,) in 0..1, given their classes (batch,)."""

    def __init__(self, layers: int, width: int, recompute: bool) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH**2, width)
        self.position = nn.Parameter(torch.randn(TOKENS, width) * 0.02)
        self.label = nn.Embedding(CLASSES, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, recompute) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = Modulation(width, parts=2)
        self.velocity = nn.Linear(width, PATCH**2)

    def forward(self, images: torch.Tensor, times: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(1, 2).flatten(2)
        x = self.patch(patches) + self.position
        condition = self.time(sinusoids(times, x.shape[-1]).to(x.dtype)) + self.label(labels)
        for block in self.blocks:
            x = block(x, condition)
        patches = self.velocity(modulate(self.norm(x), *self.modulation(condition).unbind(1)))
        rows = patches.unflatten(2, (PATCH, PATCH)).unflatten(1, (SIZE // PATCH, SIZE // PATCH))
        return rows.transpose(2, 3).reshape(-1, SIZE, SIZE)


def sinusoids(times: torch.Tensor, width: int) -> torch.Tensor:
    """float32 (batch, width): cosines and sines of the times (batch,) at frequencies from 1000 down to 0.1."""
    frequencies = 1000 * torch.exp(-math.log(10000) * torch.linspace(0, 1, width // 2, device=times.device))
    angles = times.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def load_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images float32 (1797, SIZE, SIZE) in -1..1 and their classes int64 (1797,)."""
    with gzip.open(DIGITS, "rt") as lines:
        table = torch.tensor([[int(value) for value in line.split(",")] for line in lines])
    return (table[:, :-1] / 8 - 1).unflatten(1, (SIZE, SIZE)), table[:, -1]


def digit_batches(batch: int, seed: int, device: torch.device) -> Iterator[tuple[torch.Tensor, ...]]:
    """Endless random (images, their classes, noise of the images' shape, times in 0..1)."""
    images, labels = load_digits()
    generator = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(images), (batch,), generator=generator)
        noise = torch.randn(batch, SIZE, SIZE, generator=generator)
        times = torch.rand(batch, generator=generator)
        yield tuple(part.to(device) for part in (images[chosen], labels[chosen], noise, times))


def train(fsdp: str, options: Options, mesh: DeviceMesh, meter: Meter) -> None:
    if fsdp == "torch":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    else:
        from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(options.seed)
    model = DiffusionTransformer(options.layers, options.width, options.checkpoint)
    precision = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if options.bf16 else ()))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_with_warmup(options.steps))
    batches = digit_batches(options.batch, options.seed + mesh.get_rank(), meter.device)

    for _ in meter.steps(options.steps):
        step_loss = torch.zeros((), device=meter.device)
        for micro_batch in range(options.micro_batches):
            model.set_requires_gradient_sync(micro_batch == options.micro_batches - 1)
            images, labels, noise, times = next(batches)
            # Flow matching: on the straight way from the image (time 0) to the noise (time 1), which way and how fast.
            noised = torch.lerp(images, noise, times[:, None, None])
            velocity = model(noised, times, labels).float()
            loss = F.mse_loss(velocity, noise - images) / options.micro_batches
            loss.backward()
            step_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        meter.note_loss(step_loss)


if __name__ == "__main__":
    command(train, DEFAULTS, title="Diffusion transformer", loss_unit="MSE of the velocity")
