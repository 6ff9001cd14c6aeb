"""Which models can be written in both forms: dense decoders with rotary positions, RMSNorm and SwiGLU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .values import AttentionHeads

type Family = Literal["llama", "qwen2", "qwen3"]

# Megatron's constants for Llama 3's stretched positions; only the factor is a setting there.
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Architecture:
    """Sizes and kinds of one model.

    Args:
        vocabulary: rows of the embedding table that stand for tokens.
        padded_vocabulary: rows of that table in Megatron.
        rope_factor: by which Llama 3's stretched positions are stretched; None without.
        qkv_bias: only the projections to query, key and value have a bias.
        linear_bias: all projections have one.
        tied: the output layer is the embedding table.
        bf16: the run computes in bfloat16.

    Raises:
        ValueError: a size is below one, a factor isn't positive, the padded vocabulary is the smaller one, or no model
            of Hugging Face's has that choice of norms and biases.
    """

    layers: int
    hidden_size: int
    ffn_size: int
    attention: AttentionHeads
    vocabulary: int
    padded_vocabulary: int
    positions: int
    norm_epsilon: float
    rope_base: float
    rope_factor: float | None
    qk_norm: bool
    qkv_bias: bool
    linear_bias: bool
    tied: bool
    bf16: bool

    def __post_init__(self) -> None:
        for name in ("layers", "hidden_size", "ffn_size", "vocabulary", "positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number of at least 1")
        for name in ("norm_epsilon", "rope_base", "rope_factor"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value}; give a positive number")
        if self.padded_vocabulary < self.vocabulary:
            raise ValueError(
                f"the padded vocabulary is {self.padded_vocabulary}; give at least {self.vocabulary}, the vocabulary"
            )
        if self.qk_norm and (self.qkv_bias or self.linear_bias):
            raise ValueError(
                "norms of query and key (qk_layernorm) together with biases (add_qkv_bias, add_bias_linear) are in no "
                "model of Hugging Face's that is known here: Qwen3 has the norms alone, Qwen2 and Llama biases alone"
            )

    @property
    def family(self) -> Family:
        """The model type of Hugging Face's that computes the same."""
        if self.qk_norm:
            return "qwen3"
        return "qwen2" if self.qkv_bias and not self.linear_bias else "llama"

    @property
    def query_size(self) -> int:
        return self.attention.heads * self.attention.head_size

    @property
    def key_size(self) -> int:
        return self.attention.query_groups * self.attention.head_size
