"""The models that are measured: small, plain, and free of anything a wrapper could profit from."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

HIDDEN = 256
LAYERS = 8
HEADS = 8
VOCABULARY = 2048


class Block(nn.Module):
    """A pre-norm transformer layer with 12 parameters; input and output ``(batch, sequence, hidden)``."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, sequence, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    """Embedding, pre-norm blocks and an output layer. By default 8 blocks of hidden size 256: 28.1 MiB in fp32.

    With ``recompute`` a block keeps its input alone, and is computed again in backward.
    """

    def __init__(
        self, hidden: int = HIDDEN, layers: int = LAYERS, vocabulary: int = VOCABULARY, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList([Block(hidden, HEADS) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy loss of int64 ``(batch, sequence)`` targets."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TinyUnit(nn.Module):
    """Six linear layers of hidden size 8, so 12 tiny parameters: a unit whose own computing costs next to nothing."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TinyStack(nn.Module):
    """``units`` tiny units in a row; the outer module has no parameters of its own."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList([TinyUnit() for _ in range(units)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
        return x
