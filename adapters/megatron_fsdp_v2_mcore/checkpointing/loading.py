"""What is done around and inside stock's `load_checkpoint`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.training.checkpointing import CheckpointType, set_loaded_iteration
from megatron.training.utils import print_rank_0

from megatron_fsdp_v2.checkpoint.collective_errors import on_rank_zero
from megatron_fsdp_v2.checkpoint.errors import CheckpointError

from ..arguments import asks_for_v2
from ..optimizer import FSDPv2DistributedOptimizer
from ..wrapper import PluginFSDPv2
from .folders import Found, find_checkpoint
from .sharded import load_facts, load_sharded
from .torch_dist import load_torch_dist


@dataclass(frozen=True)
class Target:
    """What is being loaded into."""

    wrapper: PluginFSDPv2
    optimizer: FSDPv2DistributedOptimizer | None


_target: ContextVar[Target | None] = ContextVar("target of the load in progress", default=None)


def wrap_load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets the functions inside know model and optimizer, which stock hands them in parts only."""

    @functools.wraps(original)
    def load_checkpoint(ddp_model: list[Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(ddp_model[0], PluginFSDPv2):
            return original(ddp_model, optimizer, *args, **kwargs)
        with _loading(Target(ddp_model[0], _single(optimizer))):
            return original(ddp_model, optimizer, *args, **kwargs)

    return load_checkpoint


def wrap_load_base_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Loads into a v2 model, in place and strictly; leaves the look at the checkpoint beforehand to stock."""

    @functools.wraps(original)
    def _load_base_checkpoint(
        load_dir: str | None,
        args: Any,
        rank0: bool = False,
        sharded_state_dict: dict[str, Any] | None = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        if not asks_for_v2(args):
            return original(load_dir, args, rank0, sharded_state_dict, *rest, **options)
        found = _find(load_dir, args)
        if found is None or (rank0 and found.format == "torch_dist"):
            return original(load_dir, args, rank0, sharded_state_dict, *rest, **options)
        if rank0:
            return load_facts(found.path), str(found.path), found.release, CheckpointType.FSDP_DTENSOR
        target = _target.get()
        assert target is not None
        assert sharded_state_dict is not None
        _refuse_absent_optimizer(found, args, target, sharded_state_dict)
        set_loaded_iteration(found.iteration)
        print_rank_0(f" loading checkpoint {found.path}")
        if found.format == "torch_dist":
            state_dict = load_torch_dist(found.path, sharded_state_dict, target.wrapper.root, target.optimizer)
            return state_dict, str(found.path), found.release, CheckpointType.GLOBAL
        state_dict = load_sharded(found.path, sharded_state_dict, target.wrapper.root, target.optimizer, args)
        return state_dict, str(found.path), found.release, CheckpointType.FSDP_DTENSOR

    return _load_base_checkpoint


def wrap_get_load_checkpoint_path(original: Callable[..., Any]) -> Callable[..., Any]:
    """Answers with the folder that v2 loads, which may be that of `--pretrained-checkpoint` or one moved aside."""

    @functools.wraps(original)
    def get_load_checkpoint_path_by_args(args: Any, load_arg: str = "load") -> Any:
        if not asks_for_v2(args) or load_arg != "load":
            return original(args, load_arg)
        # Of both stock takes the second only where the first holds no checkpoint.
        found = _find(args.load, args) or _find(args.pretrained_checkpoint, args)
        return original(args, load_arg) if found is None else str(found.path)

    return get_load_checkpoint_path_by_args


def _refuse_absent_optimizer(found: Found, args: Any, target: Target, wanted: dict[str, Any]) -> None:
    """Stock doesn't ask for optimizer state that wasn't saved, and stumbles over that later."""
    is_needed = target.optimizer is not None and not (found.release or args.finetune or args.no_load_optim)
    if is_needed and "optimizer" not in wanted:
        raise CheckpointError(f"{found.path} has no optimizer state: give --no-load-optim to load the weights alone")


@contextmanager
def _loading(target: Target) -> Iterator[None]:
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def _single(optimizer: Any) -> FSDPv2DistributedOptimizer | None:
    if isinstance(optimizer, ChainedOptimizer):
        (optimizer,) = optimizer.chained_optimizers
    return optimizer if isinstance(optimizer, FSDPv2DistributedOptimizer) else None


def _find(folder: str | None, args: Any) -> Found | None:
    find = functools.partial(find_checkpoint, folder, getattr(args, "ckpt_step", None))
    # With --use-checkpoint-args stock looks before there are groups.
    return on_rank_zero(find) if dist.is_initialized() else find()
