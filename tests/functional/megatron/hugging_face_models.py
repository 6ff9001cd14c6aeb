"""Llama, Qwen2 and Qwen3 from the files that Hugging Face's libraries read, in plain torch and nothing of ours."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional

type Tensors = dict[str, torch.Tensor]


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [sequences, length, vocabulary] in float32 of a model folder for tokens [sequences, length]."""
    config = json.loads((folder / "config.json").read_text())
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= {name: tensor.float() for name, tensor in load_file(file).items()}
    hidden = tensors["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        normed = _norm(hidden, tensors[f"{prefix}input_layernorm.weight"], config)
        hidden = hidden + _attention(normed, tensors, f"{prefix}self_attn.", config)
        normed = _norm(hidden, tensors[f"{prefix}post_attention_layernorm.weight"], config)
        gate, up = (_linear(normed, tensors, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
        hidden = hidden + _linear(functional.silu(gate) * up, tensors, f"{prefix}mlp.down_proj")
    output = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    return _linear(_norm(hidden, tensors["model.norm.weight"], config), tensors, output)


def _attention(hidden: torch.Tensor, tensors: Tensors, prefix: str, config: dict[str, Any]) -> torch.Tensor:
    size, heads = config["head_dim"], config["num_attention_heads"]
    query, key, value = (
        _linear(hidden, tensors, f"{prefix}{name}_proj").unflatten(-1, (-1, size)).transpose(1, 2) for name in "qkv"
    )
    if f"{prefix}q_norm.weight" in tensors:
        query = _norm(query, tensors[f"{prefix}q_norm.weight"], config)
        key = _norm(key, tensors[f"{prefix}k_norm.weight"], config)
    query, key = _rotated(query, config), _rotated(key, config)
    per_group = heads // config["num_key_value_heads"]
    key, value = (part.repeat_interleave(per_group, dim=1) for part in (key, value))
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return _linear(mixed.transpose(1, 2).flatten(2), tensors, f"{prefix}o_proj")


def _rotated(heads: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    length, size = heads.shape[-2:]
    frequencies = [frequency(2 * n / size, config) for n in range(size // 2)]
    angles = torch.outer(torch.arange(length).float(), torch.tensor(frequencies))
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def frequency(exponent: float, config: dict[str, Any]) -> float:
    """Radians per position of the dimension that the exponent stands for.

    Llama 3 divides low frequencies by a factor, leaves high ones, and goes from one to the other in between.
    """
    frequency = config["rope_theta"] ** -exponent
    scaling = config["rope_scaling"]
    if scaling is None:
        return frequency
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return kept * frequency + (1 - kept) * frequency / scaling["factor"]


def _norm(values: torch.Tensor, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    return functional.rms_norm(values, weight.shape, weight, config["rms_norm_eps"])


def _linear(values: torch.Tensor, tensors: Tensors, name: str) -> torch.Tensor:
    return functional.linear(values, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
