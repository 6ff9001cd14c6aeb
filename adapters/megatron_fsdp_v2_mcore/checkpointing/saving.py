"""What is done around and inside stock's `save_checkpoint`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import get_args
from megatron.training.checkpointing import get_checkpoint_name
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException

from megatron_fsdp_v2.checkpoint.agreement import Offer, build_alike
from megatron_fsdp_v2.checkpoint.collective_errors import causes_of, on_rank_zero
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.optimizer_state import keys_that_may_lack
from megatron_fsdp_v2.checkpoint.storage import begin_write, cancel_write, end_write

from ..arguments import asks_for_v2
from .contents import prepare
from .folders import complete_iterations, mend_tracker
from .fused_parameters import fused_layouts


def wrap_save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps what the folder held until the new checkpoint is whole, and says what is intact when it can't be."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        settings = get_args()
        if not asks_for_v2(settings):
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        name = get_checkpoint_name(
            settings.save, given["iteration"], release=given.get("release", False), return_base_dir=True
        )
        path = Path(name)
        on_rank_zero(functools.partial(_make_ready, path))
        try:
            result = original(*args, **kwargs)
        except CheckpointException as error:
            raise CheckpointError(_failure(path, error)) from error
        # Raised on all ranks before anything was written.
        except CheckpointError:
            if dist.get_rank() == 0:
                cancel_write(path)
            raise
        on_rank_zero(functools.partial(end_write, path))
        return result

    return save_checkpoint


def wrap_preprocess_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Prepares the state dict of a v2 model without asking other ranks about any tensor."""

    @functools.wraps(original)
    def preprocess_fsdp_dtensor_state_dict(args: Any, raw_state_dict: dict[str, Any], model: nn.Module) -> Any:
        if not asks_for_v2(args):
            return original(args, raw_state_dict, model)
        return build_alike(functools.partial(prepare, raw_state_dict, model), functools.partial(_offer_of, model))

    return preprocess_fsdp_dtensor_state_dict


def _offer_of(model: nn.Module, state_dict: dict[str, Any]) -> Offer:
    flat, _ = flatten_state_dict(state_dict)
    return Offer(flat, keys_that_may_lack(dict(model.named_parameters()), fused_layouts(model)))


def _make_ready(path: Path) -> None:
    begin_write(path)
    mend_tracker(path.parent)


def _failure(path: Path, error: CheckpointException) -> str:
    intact = complete_iterations(path.parent)
    kept = f"the newest whole checkpoint is {intact[-1][1]}" if intact else "there is no whole checkpoint"
    return f"{path} could not be saved ({causes_of(error)}); {kept}"
