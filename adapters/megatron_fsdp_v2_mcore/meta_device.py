"""Initialisers for parallel layers of Megatron-Core that have none, so that they may be built on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

# Which method of the configuration fills the weight of which layer, as the layer specs of GPT and hybrid models say.
_WEIGHT_METHODS = {
    "ColumnParallelLinear": "init_method",
    "RowParallelLinear": "output_layer_init_method",
    "VocabParallelEmbedding": "embedding_init_method",
}


def provide_initializers(model: nn.Module) -> None:
    """Gives every parallel layer below `model` that holds meta parameters a `reset_parameters`, if it has none."""
    for module in model.modules():
        if hasattr(module, "reset_parameters") or not any(p.is_meta for p in module.parameters(recurse=False)):
            continue
        for cls in type(module).__mro__:
            if cls.__name__ in _WEIGHT_METHODS:
                method = getattr(module.config, _WEIGHT_METHODS[cls.__name__])
                module.reset_parameters = partial(_fill, module, method)  # type: ignore[assignment]
                break


@torch.no_grad()
def _fill(module: Any, init_method: Callable[[torch.Tensor], object]) -> None:
    init_method(module.weight)
    if getattr(module, "bias", None) is not None:
        module.bias.zero_()
