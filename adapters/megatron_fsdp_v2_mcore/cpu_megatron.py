"""What CPU emulation changes in Megatron's code, as a row of the patch table."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def wrap_maybe_move_tensor_to_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Convert a tensor that's on the CPU already to NumPy when that's what the caller asked for."""

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            return tensor.numpy()
        return original(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return maybe_move_tensor_to_cpu
