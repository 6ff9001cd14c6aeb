"""DeepSeek-V3 as shapes: every parameter in a module of its place, and no computing."""

from __future__ import annotations

import torch
import torch.nn as nn

HIDDEN = 7168
VOCABULARY = 129280
HEADS = 128
QUERY_RANK, KEY_VALUE_RANK = 1536, 512
NOPE_WIDTH, ROPE_WIDTH, VALUE_WIDTH = 128, 64, 128
DENSE_LAYERS, DENSE_WIDTH = 3, 18432
EXPERTS, EXPERT_WIDTH = 256, 2048
LAYERS = 61


class Weights(nn.Module):
    """Uninitialised bf16 parameters by name, on the present default device."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("made for its shapes alone")


class Layer(Weights):
    """A transformer layer; experts are modules of two matrices, gate and up in one as in Megatron-Core."""

    def __init__(self, dense: bool) -> None:
        super().__init__(attention_norm=(HIDDEN,), mlp_norm=(HIDDEN,))
        self.attention = Weights(
            query_down=(QUERY_RANK, HIDDEN),
            query_norm=(QUERY_RANK,),
            query_up=(HEADS * (NOPE_WIDTH + ROPE_WIDTH), QUERY_RANK),
            key_value_down=(KEY_VALUE_RANK + ROPE_WIDTH, HIDDEN),
            key_value_norm=(KEY_VALUE_RANK,),
            key_value_up=(HEADS * (NOPE_WIDTH + VALUE_WIDTH), KEY_VALUE_RANK),
            output=(HIDDEN, HEADS * VALUE_WIDTH),
        )
        if dense:
            self.mlp = _gated(DENSE_WIDTH)
            return
        self.router = Weights(weight=(EXPERTS, HIDDEN))
        self.shared_expert = _gated(EXPERT_WIDTH)
        self.experts = nn.ModuleList([_gated(EXPERT_WIDTH) for _ in range(EXPERTS)])


class DeepSeekV3(Weights):
    """Embedding, the first ``layers`` layers, a norm and the output layer, without multi-token prediction."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__(final_norm=(HIDDEN,))
        self.embedding = Weights(weight=(VOCABULARY, HIDDEN))
        self.layers = nn.ModuleList([Layer(dense=index < DENSE_LAYERS) for index in range(layers)])
        self.output_layer = Weights(weight=(VOCABULARY, HIDDEN))

    @property
    def units(self) -> list[nn.Module]:
        """What becomes a unit, the model itself last."""
        return [self.embedding, *self.layers, self.output_layer, self]


def _gated(width: int) -> Weights:
    return Weights(gate_and_up=(2 * width, HIDDEN), down=(HIDDEN, width))
