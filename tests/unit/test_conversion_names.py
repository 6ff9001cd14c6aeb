"""Names, sizes and settings of convertible models, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from megatron_fsdp_v2_mcore.conversion.architecture import Architecture
from megatron_fsdp_v2_mcore.conversion.hugging_face_config import architecture_of_config, config_of
from megatron_fsdp_v2_mcore.conversion.names import links_of
from megatron_fsdp_v2_mcore.conversion.run_settings import architecture_of_settings, flags_of, settings_of
from megatron_fsdp_v2_mcore.conversion.values import AttentionHeads

from megatron_fsdp_v2.checkpoint.errors import CheckpointError

LLAMA = Architecture(
    layers=2,
    hidden_size=32,
    ffn_size=72,
    attention=AttentionHeads(4, 2, 6),
    vocabulary=90,
    padded_vocabulary=96,
    positions=64,
    norm_epsilon=1e-6,
    rope_base=10000.0,
    rope_factor=None,
    qk_norm=False,
    qkv_bias=False,
    linear_bias=False,
    tied=True,
    bf16=False,
)
MODELS = {
    "llama": LLAMA,
    "llama3": dataclasses.replace(LLAMA, rope_base=500000.0, rope_factor=32.0),
    "biased": dataclasses.replace(LLAMA, qkv_bias=True, linear_bias=True, tied=False),
    "qwen2": dataclasses.replace(LLAMA, qkv_bias=True, bf16=True),
    "qwen3": dataclasses.replace(LLAMA, qk_norm=True, tied=False, rope_base=1e6),
}


@pytest.mark.parametrize("name", MODELS)
def test_settings_and_config_describe_the_same_model(name: str) -> None:
    model = MODELS[name]
    assert architecture_of_settings(settings_of(model)) == model
    config = config_of(model, torch.bfloat16 if model.bf16 else torch.float32)
    assert architecture_of_config(config, None, 32) == model
    modern = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    modern |= {
        "rope_parameters": {"rope_type": "default", **(config["rope_scaling"] or {})},
        "dtype": config["torch_dtype"],
    }
    modern["rope_parameters"]["rope_theta"] = model.rope_base
    assert architecture_of_config(modern, None, 32) == model


def test_families_and_flags() -> None:
    families = {name: model.family for name, model in MODELS.items()}
    assert families == {"llama": "llama", "llama3": "llama", "biased": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
    flags = " ".join(flags_of(MODELS["qwen3"]))
    assert "--qk-layernorm --disable-bias-linear --untie-embeddings-and-output-weights" in flags
    assert "--rotary-base 1000000" in flags
    assert "--use-rope-scaling --rope-scaling-factor 32.0" in flags_of(MODELS["llama3"])
    assert {"--add-qkv-bias", "--disable-bias-linear", "--bf16"} <= set(flags_of(MODELS["qwen2"]))
    assert not {"--add-qkv-bias", "--disable-bias-linear"} & set(flags_of(MODELS["biased"]))


@pytest.mark.parametrize("fused_norms", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_there_and_back(name: str, fused_norms: bool) -> None:
    model = MODELS[name]
    for link in links_of(model, fused_norms):
        whole = torch.randn(link.shape)
        if link.shape[0] == model.padded_vocabulary:
            whole[model.vocabulary :] = 0
        parts = link.split(whole)
        assert {
            name: tuple(part.shape) for name, part in zip(link.hugging_face, parts, strict=True)
        } == link.hugging_face
        assert torch.equal(link.join(parts), whole), link.megatron


def test_names_of_a_model() -> None:
    names = {link.megatron: list(link.hugging_face) for link in links_of(MODELS["qwen3"], fused_norms=False)}
    assert len(names) == 3 + 2 * 9
    first, second = "decoder.layers.1.", "model.layers.1."
    assert names[f"{first}self_attention.linear_qkv.weight"] == [f"{second}self_attn.{p}_proj.weight" for p in "qkv"]
    assert names[f"{first}mlp.linear_fc1.weight_w"] == [f"{second}mlp.gate_proj.weight"]
    assert names[f"{first}pre_mlp_layernorm.weight"] == [f"{second}post_attention_layernorm.weight"]
    assert names["output_layer.weight"] == ["lm_head.weight"]
    fused = {link.megatron for link in links_of(MODELS["qwen2"], fused_norms=True)}
    assert f"{first}mlp.linear_fc1.layer_norm_weight" in fused
    assert f"{first}self_attention.linear_qkv.bias" in fused
    assert not {"output_layer.weight", f"{first}input_layernorm.weight", f"{first}mlp.linear_fc2.bias"} & fused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 8}, "num_experts is 8"),
        ({"multi_latent_attention": True}, "multi_latent_attention is True"),
        ({"experimental_attention_variant": "gated_delta_net"}, "experimental_attention_variant"),
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type is 'learned_absolute', not 'rope'"),
        ({"normalization": "LayerNorm"}, "normalization"),
        ({"swiglu": False}, "swiglu"),
        ({"rotary_percent": 0.5}, "rotary_percent is 0.5"),
        ({"window_size": [4, 0]}, "window_size"),
        ({"softmax_type": "off-by-one"}, "softmax_type"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "qk_layernorm.*add_qkv_bias"),
        ({"hidden_size": "32"}, "the setting hidden_size of the run is '32'"),
        ({"padded_vocab_size": None}, "the setting padded_vocab_size"),
        ({"rotary_base": float("inf")}, "rotary_base"),
        ({"layernorm_epsilon": float("nan")}, "norm_epsilon is nan"),
        ({"vocab_size": 97}, "padded vocabulary is 96"),
    ],
)
def test_settings_that_cannot_be_converted(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        architecture_of_settings({**settings_of(LLAMA), **change})


def test_vocabulary_of_a_run() -> None:
    settings = settings_of(LLAMA)
    assert architecture_of_settings({**settings, "vocab_size": None}).vocabulary == 96
    assert architecture_of_settings({**settings, "vocab_extra_ids": 2}).vocabulary == 92
    assert architecture_of_settings(settings, vocabulary=7).vocabulary == 7
    with pytest.raises(ValueError, match="vocab size is 97; give 1 to 96"):
        architecture_of_settings(settings, vocabulary=97)


def test_heads_without_groups() -> None:
    settings = {**settings_of(LLAMA), "group_query_attention": False, "num_query_groups": 1}
    assert architecture_of_settings(settings).attention == AttentionHeads(4, 4, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral'"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_scaling": [1]}, "not an object"),
        ({"rope_theta": 10000.5}, "whole numbers"),
        ({"attention_bias": True}, "mlp_bias is False"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"rms_norm_eps": -1.0}, "norm_epsilon is -1.0"),
        ({"num_key_value_heads": 3}, "query_groups is 3"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ],
)
def test_configs_that_cannot_be_converted(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        architecture_of_config({**config_of(LLAMA, torch.float32), **change}, None, 128)


def test_what_a_config_leaves_out() -> None:
    config = config_of(LLAMA, torch.float32)
    del config["head_dim"], config["num_key_value_heads"], config["tie_word_embeddings"]
    plain = architecture_of_config(config, None, 128)
    assert plain.attention == AttentionHeads(4, 4, 8)
    assert not plain.tied
    assert plain.padded_vocabulary == 128
    assert architecture_of_config({**config, "model_type": "qwen3"}, 90, 128).attention == AttentionHeads(4, 4, 128)
    with pytest.raises(ValueError, match="padded vocab size is 89; give at least 90"):
        architecture_of_config(config, 89, 128)
