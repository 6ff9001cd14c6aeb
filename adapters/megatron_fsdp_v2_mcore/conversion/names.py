"""Which tensors of Megatron and of Hugging Face have the same values, and how they are turned into one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .architecture import Architecture
from .values import join_qkv, split_qkv, with_vocabulary_padding, without_vocabulary_padding

FUSED_NORM = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"

type Shape = tuple[int, ...]


@dataclass(frozen=True)
class Link:
    """One tensor of Megatron, named as v2's checkpoints do after `model.`, and those of Hugging Face it consists of.

    ``split`` turns Megatron's tensor into the others in their order, maybe as views; ``join`` is the way back.
    """

    megatron: str
    shape: Shape
    hugging_face: dict[str, Shape]
    split: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    join: Callable[[Sequence[torch.Tensor]], torch.Tensor]


def links_of(architecture: Architecture, fused_norms: bool) -> list[Link]:
    """All tensors of a model in the order of its forward.

    Args:
        fused_norms: norms belong to the projection behind them, as with transformer-engine's layers; otherwise they
            are modules of their own, as with Megatron's local layers.
    """
    links = [_table("embedding.word_embeddings.weight", "model.embed_tokens.weight", architecture)]
    for layer in range(architecture.layers):
        links += _layer(layer, architecture, fused_norms)
    links.append(_same("decoder.final_layernorm.weight", "model.norm.weight", architecture.hidden_size))
    if not architecture.tied:
        links.append(_table("output_layer.weight", "lm_head.weight", architecture))
    return links


def _layer(layer: int, model: Architecture, fused_norms: bool) -> Iterator[Link]:
    ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden = model.hidden_size
    norms = (
        ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        if fused_norms
        else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    )
    yield _same(f"{ours}{norms[0]}", f"{theirs}input_layernorm.weight", hidden)
    yield _qkv(f"{ours}self_attention.linear_qkv.weight", f"{theirs}self_attn.", "weight", model)
    if model.qkv_bias or model.linear_bias:
        yield _qkv(f"{ours}self_attention.linear_qkv.bias", f"{theirs}self_attn.", "bias", model)
    if model.qk_norm:
        for part in ("q", "k"):
            name = f"{theirs}self_attn.{part}_norm.weight"
            yield _same(f"{ours}self_attention.{part}_layernorm.weight", name, model.attention.head_size)
    yield from _projection(f"{ours}self_attention.linear_proj.", "", f"{theirs}self_attn.o_proj.", model, hidden)
    yield _same(f"{ours}{norms[1]}", f"{theirs}post_attention_layernorm.weight", hidden)
    # The first half of linear_fc1 goes through the activation.
    yield from _projection(f"{ours}mlp.linear_fc1.", "_w", f"{theirs}mlp.gate_proj.", model, model.ffn_size)
    yield from _projection(f"{ours}mlp.linear_fc1.", "_v", f"{theirs}mlp.up_proj.", model, model.ffn_size)
    yield from _projection(f"{ours}mlp.linear_fc2.", "", f"{theirs}mlp.down_proj.", model, hidden)


def _projection(ours: str, part: str, theirs: str, model: Architecture, rows: int) -> Iterator[Link]:
    columns = {"o_proj": model.query_size, "down_proj": model.ffn_size}.get(theirs.split(".")[-2], model.hidden_size)
    yield _same(f"{ours}weight{part}", f"{theirs}weight", rows, columns)
    if model.linear_bias:
        yield _same(f"{ours}bias{part}", f"{theirs}bias", rows)


def _same(ours: str, theirs: str, *shape: int) -> Link:
    return Link(ours, shape, {theirs: shape}, lambda tensor: [tensor], lambda tensors: tensors[0])


def _table(ours: str, theirs: str, model: Architecture) -> Link:
    return Link(
        ours,
        (model.padded_vocabulary, model.hidden_size),
        {theirs: (model.vocabulary, model.hidden_size)},
        lambda table: [without_vocabulary_padding(table, model.vocabulary)],
        lambda tables: with_vocabulary_padding(tables[0], model.padded_vocabulary),
    )


def _qkv(ours: str, theirs: str, kind: str, model: Architecture) -> Link:
    rest = (model.hidden_size,) if kind == "weight" else ()
    rows = {"q": model.query_size, "k": model.key_size, "v": model.key_size}
    return Link(
        ours,
        (model.attention.fused_rows, *rest),
        {f"{theirs}{part}_proj.{kind}": (count, *rest) for part, count in rows.items()},
        partial(split_qkv, attention=model.attention),
        lambda parts: join_qkv(*parts, attention=model.attention),
    )
