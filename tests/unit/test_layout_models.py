"""Padding, segments and planning time for the layers of published models, up to 1024 ranks.

Shapes are those of the weights of one transformer layer without tensor parallelism: hidden sizes, head counts and
expert counts of the published configurations, fused as Megatron-Core fuses them.
"""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn

from megatron_fsdp_v2.sharding.layout import GroupLayout, plan_layout

Shapes = list[tuple[int, ...]]
WORLDS = (1, 2, 3, 8, 64, 256, 1024)


def latent_attention(hidden: int = 7168, heads: int = 128, q_rank: int = 1536, kv_rank: int = 512) -> Shapes:
    """Multi-head latent attention with head sizes 128 (query-key and value) and 64 (rotary), and the layer's norms."""
    return [
        (hidden,),
        (q_rank, hidden),
        (q_rank,),
        (heads * (128 + 64), q_rank),
        (kv_rank + 64, hidden),
        (kv_rank,),
        (heads * (128 + 128), kv_rank),
        (hidden, heads * 128),
        (hidden,),
    ]


def grouped_attention(hidden: int, heads: int, groups: int) -> Shapes:
    """Grouped-query attention with heads of 128 and norms of queries and keys, and the layer's norms."""
    return [(hidden,), ((heads + 2 * groups) * 128, hidden), (128,), (128,), (hidden, heads * 128), (hidden,)]


def gated_delta_net(hidden: int = 2048, key_heads: int = 16, value_heads: int = 32) -> Shapes:
    """A gated delta net with heads of 128: input projection, convolution over 4, gates, norm, output projection."""
    keys, values = key_heads * 128, value_heads * 128
    projection = 2 * keys + 2 * values + 2 * value_heads
    convolution = 2 * keys + values
    return [
        (hidden,),
        (projection, hidden),
        (convolution, 1, 4),
        (value_heads,),
        (value_heads,),
        (128,),
        (hidden, values),
        (hidden,),
    ]


def gated_mlp(hidden: int, ffn: int) -> Shapes:
    return [(2 * ffn, hidden), (hidden, ffn)]


def grouped_experts(hidden: int, ffn: int, experts: int) -> Shapes:
    """All experts in two weights, one expert below the other."""
    return [(experts * 2 * ffn, hidden), (experts * hidden, ffn)]


def stacked_experts(hidden: int, ffn: int, experts: int) -> Shapes:
    """All experts in two 3-D weights, whose rows are whole experts."""
    return [(experts, 2 * ffn, hidden), (experts, hidden, ffn)]


DEEPSEEK_DENSE = latent_attention() + gated_mlp(7168, 18432)
DEEPSEEK_SPARSE = [*latent_attention(), (256, 7168), *gated_mlp(7168, 2048)]
DEEPSEEK_EXPERTS = gated_mlp(7168, 2048) * 256
QWEN3_235B = [*grouped_attention(4096, 64, 4), (128, 4096)]
QWEN3_30B = [*grouped_attention(2048, 32, 4), (128, 2048)]
QWEN35_DELTA = [*gated_delta_net(), (256, 2048), (1, 2048), *gated_mlp(2048, 512)]

MODELS: dict[str, Shapes] = {
    "DeepSeek-V3 dense": DEEPSEEK_DENSE,
    "DeepSeek-V3 MoE, separate experts": DEEPSEEK_SPARSE + DEEPSEEK_EXPERTS,
    "DeepSeek-V3 MoE, grouped experts": DEEPSEEK_SPARSE + grouped_experts(7168, 2048, 256),
    "DeepSeek-V3 MoE, stacked experts": DEEPSEEK_SPARSE + stacked_experts(7168, 2048, 256),
    "DeepSeek-V3 MoE without experts": DEEPSEEK_SPARSE,
    "DeepSeek-V3 experts of one of 64 ranks": gated_mlp(7168, 2048) * 4,
    "DeepSeek-V3 embedding": [(129280, 7168)],
    "Qwen3-235B, separate experts": QWEN3_235B + gated_mlp(4096, 1536) * 128,
    "Qwen3-235B, grouped experts": QWEN3_235B + grouped_experts(4096, 1536, 128),
    "Qwen3-235B dense": grouped_attention(4096, 64, 4) + gated_mlp(4096, 12288),
    "Qwen3-30B, separate experts": QWEN3_30B + gated_mlp(2048, 768) * 128,
    "Qwen3-30B, grouped experts": QWEN3_30B + grouped_experts(2048, 768, 128),
    "Qwen3.5-35B gated delta net": QWEN35_DELTA + gated_mlp(2048, 512) * 256,
    "gated delta net alone": gated_delta_net(),
    "coprime rows": [(4096, 4096), (4096, 4097)],
    "coprime rows with biases": [(4096, 4096), (4096,), (4097, 4097), (4097,), (4095, 4096)],
    "vision layer": [(1152,), (3456, 1152), (3456,), (1152, 1152), (1152,), (4304, 1152), (4304,), (1152, 4304)],
    "scalars": [(), (), ()],
    "scalars beside a weight": [(), (64, 4096), ()],
    "no rows": [(0, 4096), (64, 4096)],
    "no columns": [(4096, 0), (64, 4096)],
    "nothing at all": [(0, 7), (7, 0), (0,)],
    "fewer rows than ranks": [(1, 4096), (5, 64), (2,)],
}


def allowance(layout: GroupLayout) -> float:
    """The padding allowed: one percent of the group, and the longest row of every segment on every rank."""
    longest = [0] * len(layout.chunks)
    for extent in layout.extents:
        longest[extent.segment] = max(longest[extent.segment], extent.row_numel)
    return 0.01 * layout.param_numel + layout.world * sum(longest)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("model", MODELS)
def test_padding_bound(model: str, world: int) -> None:
    layout = plan_layout(MODELS[model], world)
    assert layout.param_numel == sum(math.prod(shape) for shape in MODELS[model])
    assert layout.padding <= (allowance(layout) if world > 1 else 0)


# Ranks hold one or two rows of what these groups have, so whole rows alone cost more than one percent.
_FEW_ROWS_PER_RANK = {
    ("DeepSeek-V3 MoE, stacked experts", 1024),
    ("DeepSeek-V3 MoE without experts", 256),
    ("DeepSeek-V3 MoE without experts", 1024),
}


@pytest.mark.parametrize(
    ("model", "world"),
    [
        (model, world)
        for model in MODELS
        for world in WORLDS
        if model.startswith(("DeepSeek", "Qwen")) and (model, world) not in _FEW_ROWS_PER_RANK
    ],
)
def test_published_layers_stay_below_one_percent(model: str, world: int) -> None:
    """Far inside the bound, which allows a row per rank and segment."""
    layout = plan_layout(MODELS[model], world)
    assert layout.padding <= 0.01 * layout.param_numel


@pytest.mark.parametrize("world", [256, 1024])
@pytest.mark.parametrize("model", ["DeepSeek-V3 dense", "DeepSeek-V3 MoE, separate experts", "Qwen3-235B dense"])
def test_few_segments(model: str, world: int) -> None:
    """Each segment is one more tensor in a coalesced call."""
    assert len(plan_layout(MODELS[model], world).chunks) <= 3


class _Layer(nn.Module):
    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes])


@pytest.mark.parametrize("experts", ["separate", "grouped"])
def test_planning_a_whole_deepseek_v3_takes_seconds(experts: str) -> None:
    routed = DEEPSEEK_EXPERTS if experts == "separate" else grouped_experts(7168, 2048, 256)
    with torch.device("meta"):
        layers = [_Layer([(129280, 7168)])]
        layers += [_Layer(DEEPSEEK_DENSE) for _ in range(3)]
        layers += [_Layer(DEEPSEEK_SPARSE + routed) for _ in range(58)]
        layers += [_Layer([(7168,), (129280, 7168)])]
    start = time.perf_counter()
    plans = [plan_layout([weight.shape for weight in layer.weights], 1024) for layer in layers]
    seconds = time.perf_counter() - start
    parameters = sum(plan.param_numel for plan in plans)
    print(f"{parameters / 1e9:.0f}e9 parameters in {sum(len(plan.extents) for plan in plans)} weights: {seconds:.2f} s")
    assert 670e9 < parameters < 672e9
    assert sum(plan.padding for plan in plans) <= 0.01 * parameters
    assert seconds < 30
