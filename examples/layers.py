"""The layers that both models consist of."""

import torch
import torch.nn as nn
import torch.nn.functional as F

HEAD_SIZE = 32


class Attention(nn.Module):
    """Multi-head self-attention with heads of ``HEAD_SIZE``, on (batch, length, width)."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for part in self.project_in(x).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.project_out(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """Two linear layers, four times as wide in between."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
