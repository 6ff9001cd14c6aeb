"""The state dict that stock gathers, made ready for DCP: fused parameters apart, every chunk known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.checkpoint.chunk_metadata import attach_chunk_metadata, chunk_metadata_of, verify_chunks
from megatron_fsdp_v2.checkpoint.fused import split_states, split_weights

from .fused_parameters import fused_layouts

# Calibration of low-precision kernels, which every run makes anew.
_EXTRA_STATE = "_extra_state"


def prepare(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """What DCP saves or loads for stock's state dict, on the same memory. No communication.

    Args:
        state_dict: from stock's `generate_state_dict`; `model` and, if there, `optimizer` hold DTensors.
        model: the sharded model, without wrappers.

    Raises:
        ChunkError: what this rank holds of some tensors isn't known.
        ValueError: a fused parameter isn't as long as its module says.
    """
    layouts = fused_layouts(model)
    weights = {key: value for key, value in state_dict["model"].items() if not key.endswith(_EXTRA_STATE)}
    for value in weights.values():
        if isinstance(value, DTensor) and chunk_metadata_of(value) is None:
            attach_chunk_metadata(value, "preprocess")
    prepared = {**state_dict, "model": split_weights(weights, layouts)}
    if "optimizer" in state_dict:
        optimizer = state_dict["optimizer"]
        prepared["optimizer"] = {**optimizer, "state": split_states(optimizer["state"], layouts)}
    verify_chunks(prepared)
    return prepared
