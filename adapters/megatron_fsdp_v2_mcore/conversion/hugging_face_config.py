"""A model as the `config.json` of Hugging Face describes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_v2.checkpoint.errors import CheckpointError

from .architecture import LLAMA3_ROPE, Architecture
from .values import AttentionHeads

FILE_NAME = "config.json"
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# What transformers takes where the file says nothing.
_DEFAULT_HEAD_SIZE = {"qwen3": 128}
# Settings that change what a model computes, and the values with which Megatron's computes the same.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1.0, None),
    "quantization_config": (None,),
}


def config_of(model: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """The content of `config.json`. Token ids are null: they belong to the tokenizer, which no checkpoint holds."""
    family = model.family
    biases = {"attention_bias": model.linear_bias}
    if family == "llama":
        biases["mlp_bias"] = model.linear_bias
    scaling = None if model.rope_factor is None else {"rope_type": "llama3", "factor": model.rope_factor, **LLAMA3_ROPE}
    return {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_attention_heads": model.attention.heads,
        "num_key_value_heads": model.attention.query_groups,
        "head_dim": model.attention.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_base,
        "rope_scaling": scaling,
        "max_position_embeddings": model.positions,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": model.tied,
        **({} if family == "qwen2" else biases),
        **({} if family == "llama" else {"use_sliding_window": False}),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def read_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's `config.json`.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    return read_json(folder / FILE_NAME)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object in a file; errors as for `read_config`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a {type(content).__name__}, not an object")
    return content


def architecture_of_config(config: Mapping[str, Any], padded_vocabulary: int | None, divisor: int) -> Architecture:
    """The model that a `config.json` describes.

    Args:
        padded_vocabulary: rows of Megatron's tables; by default the vocabulary, made a multiple of `divisor`.

    Raises:
        CheckpointError: an entry is missing or of another type, or Megatron's dense models can't compute that.
        ValueError: the padded vocabulary is smaller than the vocabulary.
    """
    family = config.get("model_type")
    if family not in _CLASSES:
        raise CheckpointError(f"model_type is {family!r}; what can be converted is {', '.join(_CLASSES)}")
    _refuse_unsupported(config)
    base, factor = _rope(config)
    vocabulary = _get(config, "vocab_size", int)
    if padded_vocabulary is None:
        padded_vocabulary = -(-vocabulary // divisor) * divisor
    elif padded_vocabulary < vocabulary:
        raise ValueError(f"padded vocab size is {padded_vocabulary}; give at least {vocabulary}, that of the model")
    heads = _get(config, "num_attention_heads", int)
    hidden_size = _get(config, "hidden_size", int)
    head_size = _get(config, "head_dim", int, _DEFAULT_HEAD_SIZE.get(family, hidden_size // max(heads, 1)))
    linear_bias = _has_biases(config, family)
    try:
        return Architecture(
            layers=_get(config, "num_hidden_layers", int),
            hidden_size=hidden_size,
            ffn_size=_get(config, "intermediate_size", int),
            attention=AttentionHeads(heads, _get(config, "num_key_value_heads", int, heads), head_size),
            vocabulary=vocabulary,
            padded_vocabulary=padded_vocabulary,
            positions=_get(config, "max_position_embeddings", int),
            norm_epsilon=_get(config, "rms_norm_eps", float, 1e-6),
            rope_base=base,
            rope_factor=factor,
            qk_norm=family == "qwen3",
            qkv_bias=family == "qwen2" or linear_bias,
            linear_bias=linear_bias,
            tied=_get(config, "tie_word_embeddings", bool, False),
            bf16=config.get("torch_dtype", config.get("dtype")) == "bfloat16",
        )
    except ValueError as error:
        raise CheckpointError(f"{FILE_NAME} can't be converted: {error}") from error


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    problems = [f"{name} is {config[name]!r}" for name, allowed in _ALLOWED.items() if config.get(name) not in allowed]
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        problems.append("layer_types has others than full_attention")
    if problems:
        raise CheckpointError(f"Megatron's dense models can't compute what {FILE_NAME} says: {'; '.join(problems)}")


def _has_biases(config: Mapping[str, Any], family: str) -> bool:
    """Whether all projections have biases; in Megatron it's all, those of query, key and value, or none."""
    if family == "qwen2":
        return False
    attention = _get(config, "attention_bias", bool, False)
    mlp = _get(config, "mlp_bias", bool, False) if family == "llama" else False
    if attention != mlp:
        raise CheckpointError(
            f"attention_bias is {attention} and mlp_bias is {mlp} in {FILE_NAME}; Megatron has both or none"
        )
    return attention


def _rope(config: Mapping[str, Any]) -> tuple[float, float | None]:
    """Base of the rotary frequencies, and Llama 3's factor if there is one. There are two ways to write them."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"the rotary parameters in {FILE_NAME} are {found!r}, not an object")
    base = _get(found if "rope_theta" in found else config, "rope_theta", float, 10000.0)
    if not base.is_integer():
        raise CheckpointError(f"rope_theta is {base} in {FILE_NAME}; Megatron takes whole numbers")
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return base, None
    others = {name: found.get(name) for name in LLAMA3_ROPE}
    if kind != "llama3" or others != LLAMA3_ROPE:
        raise CheckpointError(
            f"the rotary parameters in {FILE_NAME} are {found!r}; Megatron knows the type default, and llama3 with "
            f"{LLAMA3_ROPE} and a factor"
        )
    return base, _get(found, "factor", float)


def _get[T: (int, float, bool)](config: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    value = config.get(name)
    value = default if value is None else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = isinstance(value, bool) if kind is bool else is_number and (kind is float or isinstance(value, int))
    if not fits:
        raise CheckpointError(f"{name} is {value!r} in {FILE_NAME}; a value of type {kind.__name__} is needed")
    return kind(value)
