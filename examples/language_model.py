"""Trains a small language model on bytes of English text, sharded by FSDP2 and by megatron_fsdp_v2 in turn.

torchrun --nproc-per-node 2 examples/language_model.py --help
"""

from collections.abc import Iterator
from pydoc_data.topics import topics

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import Meter, Options, command, cosine_with_warmup
from layers import Attention, FeedForward
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256
LENGTH = 64
DEFAULTS = Options(steps=30, batch=4, layers=3, width=128, lr=3e-3)


class Block(nn.Module):
    def __init__(self, width: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm, self.attention = nn.LayerNorm(width), Attention(width, causal=True)
        self.feed_forward_norm, self.feed_forward = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.recompute else self.compute(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    """Decoder-only transformer: bytes (batch, LENGTH) to logits (batch, LENGTH, VOCABULARY) of the next ones."""

    def __init__(self, layers: int, width: int, recompute: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, recompute) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def text_batches(batch: int, seed: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (tokens, the token after each), int64 (batch, LENGTH): random places of Python's language reference."""
    text = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (batch, 1), generator=generator)
        sample = text[starts + torch.arange(LENGTH + 1)].long().to(device)
        yield sample[:, :-1], sample[:, 1:]


def train(fsdp: str, options: Options, mesh: DeviceMesh, meter: Meter) -> None:
    if fsdp == "torch":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    else:
        from megatron_fsdp_v2 import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(options.seed)
    model = LanguageModel(options.layers, options.width, options.checkpoint)
    precision = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if options.bf16 else ()))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_with_warmup(options.steps))
    batches = text_batches(options.batch, options.seed + mesh.get_rank(), meter.device)

    for _ in meter.steps(options.steps):
        step_loss = torch.zeros((), device=meter.device)
        for micro_batch in range(options.micro_batches):
            model.set_requires_gradient_sync(micro_batch == options.micro_batches - 1)
            tokens, following = next(batches)
            logits = model(tokens).float()
            loss = F.cross_entropy(logits.flatten(0, 1), following.flatten()) / options.micro_batches
            loss.backward()
            step_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        meter.note_loss(step_loss)


if __name__ == "__main__":
    command(train, DEFAULTS, title="Language model", loss_unit="nats per byte")
