"""Initialisers for layers that Megatron-Core fills elsewhere, so that they may be built on the meta device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
# Plain torch layers that their owner fills after it built them; their own initialiser would leave other values.
_FILLED_BY_OWNER = {
    "LanguageModelEmbedding": {
        "position_embeddings": "embedding_init_method",
        "tokentype_embeddings": "embedding_init_method",
    },
}


def provide_initializers(model: nn.Module) -> None:
    """Gives layers below `model` that hold meta parameters the `reset_parameters` that fills them as stock does.

    That is every parallel layer that has none, and the layers of an owner that fills them itself.
    """
    for module in model.modules():
        _take_over_from_owner(module)
        if hasattr(module, "reset_parameters") or not any(p.is_meta for p in module.parameters(recurse=False)):
            continue
        for cls in type(module).__mro__:
            if cls.__name__ in _WEIGHT_METHODS:
                method = getattr(module.config, _WEIGHT_METHODS[cls.__name__])
                module.reset_parameters = partial(_fill_parallel, module, method)  # type: ignore[assignment]
                break


def _take_over_from_owner(owner: nn.Module) -> None:
    for cls in type(owner).__mro__:
        for name, method in _FILLED_BY_OWNER.get(cls.__name__, {}).items():
            layer = getattr(owner, name, None)
            if layer is not None and layer.weight.is_meta:
                layer.reset_parameters = partial(_fill, layer, getattr(owner.config, method))


def _fill_parallel(module: Any, init_method: Callable[[torch.Tensor], object]) -> None:
    with _random_states_of(module):
        _fill(module, init_method)


def _random_states_of(module: Any) -> AbstractContextManager[object]:
    """Random states that tensor-parallel ranks don't share, where Megatron has made some."""
    random = sys.modules.get("megatron.core.tensor_parallel.random")
    if random is None or not (tracker := random.get_cuda_rng_tracker()).is_initialized():
        return nullcontext()
    states: AbstractContextManager[object] = (
        tracker.fork(random.get_expert_parallel_rng_tracker_name())
        if getattr(module, "is_expert", False)
        else tracker.fork()
    )
    return states


@torch.no_grad()
def _fill(module: Any, init_method: Callable[[torch.Tensor], object]) -> None:
    init_method(module.weight)
    if getattr(module, "bias", None) is not None:
        module.bias.zero_()
