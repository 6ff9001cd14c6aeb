"""A model as Megatron's settings describe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_fsdp_v2.checkpoint.errors import CheckpointError

from .architecture import Architecture
from .values import AttentionHeads

_ABSENT = (None, False, 0, (), "")
# Settings that change what a model computes, and the values with which Hugging Face's models compute the same.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("num_experts", "multi_latent_attention", "experimental_attention_variant", "mtp_num_layers"),
            *("is_hybrid_model", "hybrid_layer_pattern", "hybrid_override_pattern", "linear_attention_freq", "spec"),
            *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "window_size"),
            *("attention_output_gate", "qk_l2_norm", "no_rope_freq", "mrope_section", "rotary_interleaved"),
            *("rotary_seq_len_interpolation_factor", "apply_layernorm_1p", "layernorm_zero_centered_gamma"),
            *("apply_residual_connection_post_layernorm", "glu_linear_offset", "activation_func_clamp_value"),
            *("squared_relu", "quick_geglu", "use_mup"),
        ),
        _ABSENT,
    ),
    "rotary_percent": (1.0, *_ABSENT[:1]),
    "softmax_type": ("vanilla", *_ABSENT[:1]),
    "rope_type": ("rope", *_ABSENT[:1]),
}
_NEEDED = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}


def architecture_of_settings(settings: Mapping[str, Any], vocabulary: int | None = None) -> Architecture:
    """The model of a run.

    Args:
        settings: as `read_settings` gives them.
        vocabulary: number of tokens. By default the run's `--vocab-size` or, without that, the padded number, since
            what a tokenizer said isn't among the settings.

    Raises:
        CheckpointError: a setting is missing, or the models that can be converted don't have it.
        ValueError: the vocabulary isn't between 1 and the padded one.
    """
    _refuse_unsupported(settings)
    padded = _get(settings, "padded_vocab_size", int)
    if vocabulary is None:
        own = settings.get("vocab_size")
        vocabulary = padded if own is None else own + (settings.get("vocab_extra_ids") or 0)
    elif not 1 <= vocabulary <= padded:
        raise ValueError(f"vocab size is {vocabulary}; give 1 to {padded}, the padded vocabulary of the run")
    heads = _get(settings, "num_attention_heads", int)
    is_grouped = _get(settings, "group_query_attention", bool)
    linear_bias = _get(settings, "add_bias_linear", bool)
    try:
        return Architecture(
            layers=_get(settings, "num_layers", int),
            hidden_size=_get(settings, "hidden_size", int),
            ffn_size=_get(settings, "ffn_hidden_size", int),
            attention=AttentionHeads(
                heads,
                _get(settings, "num_query_groups", int) if is_grouped else heads,
                _get(settings, "kv_channels", int),
            ),
            vocabulary=vocabulary,
            padded_vocabulary=padded,
            positions=_get(settings, "max_position_embeddings", int),
            norm_epsilon=_get(settings, "layernorm_epsilon", float),
            rope_base=float(_get(settings, "rotary_base", int)),
            rope_factor=_get(settings, "rope_scaling_factor", float) if settings.get("use_rope_scaling") else None,
            qk_norm=_get(settings, "qk_layernorm", bool),
            qkv_bias=_get(settings, "add_qkv_bias", bool) or linear_bias,
            linear_bias=linear_bias,
            tied=not _get(settings, "untie_embeddings_and_output_weights", bool),
            bf16=bool(settings.get("bf16")),
        )
    except ValueError as error:
        raise CheckpointError(f"the settings of the run can't be converted: {error}") from error


def settings_of(model: Architecture) -> dict[str, Any]:
    """The settings with which Megatron builds this model, under the names of its parsed command line."""
    return {
        **_NEEDED,
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.attention.heads,
        "group_query_attention": True,
        "num_query_groups": model.attention.query_groups,
        "kv_channels": model.attention.head_size,
        "vocab_size": model.vocabulary,
        "padded_vocab_size": model.padded_vocabulary,
        "max_position_embeddings": model.positions,
        "layernorm_epsilon": model.norm_epsilon,
        "rotary_base": int(model.rope_base),
        "rotary_percent": 1.0,
        "use_rope_scaling": model.rope_factor is not None,
        **({} if model.rope_factor is None else {"rope_scaling_factor": model.rope_factor}),
        "qk_layernorm": model.qk_norm,
        "add_qkv_bias": model.qkv_bias,
        "add_bias_linear": model.linear_bias,
        "untie_embeddings_and_output_weights": not model.tied,
        "bf16": model.bf16,
    }


def flags_of(model: Architecture) -> list[str]:
    """The command line with which stock Megatron builds this model, without the vocabulary, which tokenizers decide."""
    flags = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden_size}",
        f"--ffn-hidden-size {model.ffn_size}",
        f"--num-attention-heads {model.attention.heads}",
        f"--group-query-attention --num-query-groups {model.attention.query_groups}",
        f"--kv-channels {model.attention.head_size}",
        f"--swiglu --normalization RMSNorm --norm-epsilon {model.norm_epsilon}",
        f"--position-embedding-type rope --rotary-base {int(model.rope_base)}",
        f"--max-position-embeddings {model.positions}",
    ]
    if model.rope_factor is not None:
        flags.append(f"--use-rope-scaling --rope-scaling-factor {model.rope_factor}")
    chosen = {
        "--qk-layernorm": model.qk_norm,
        "--add-qkv-bias": model.qkv_bias and not model.linear_bias,
        "--disable-bias-linear": not model.linear_bias,
        "--untie-embeddings-and-output-weights": not model.tied,
        "--bf16": model.bf16,
    }
    return [*flags, *(flag for flag, is_on in chosen.items() if is_on)]


def _refuse_unsupported(settings: Mapping[str, Any]) -> None:
    problems = [
        f"{name} is {settings.get(name)!r}, not {value!r}"
        for name, value in _NEEDED.items()
        if settings.get(name) != value
    ]
    for name, allowed in _ALLOWED.items():
        value = settings.get(name)
        value = tuple(value) if isinstance(value, list) else value
        if value not in allowed:
            problems.append(f"{name} is {value!r}")
    if problems:
        raise CheckpointError(
            "only dense models with rotary positions, RMSNorm and SwiGLU can be converted; in this run "
            + "; ".join(problems)
        )


def _get[T: (int, float, bool)](settings: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = settings.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = isinstance(value, bool) if kind is bool else is_number and (kind is float or value.is_integer())
    if not fits:
        raise CheckpointError(f"the setting {name} of the run is {value!r}; a value of type {kind.__name__} is needed")
    return kind(value)
