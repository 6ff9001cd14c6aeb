"""Pairs of settings that can't both hold under `--use-megatron-fsdp-v2`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

Given = Callable[[Namespace], bool]

STRATEGIES_WITH_OUTER_SHARDING = ("optim_grads_params",)


@dataclass(frozen=True)
class Contradiction:
    """A pair of settings that can't both hold. `message` names them and says what to do."""

    message: str
    holds: Given


def tensor_parallel_ranks(args: Namespace) -> int:
    """How many ranks hold parts of one layer."""
    return int(getattr(args, "tensor_model_parallel_size", 1) or 1)


def _instances(args: Namespace) -> int:
    return int(getattr(args, "num_distributed_optimizer_instances", 1) or 1)


def _data_parallel_ranks(args: Namespace) -> int:
    """Those that share shards, context-parallel ones among them."""
    return int(args.world_size) // tensor_parallel_ranks(args)


def _outer_optim(args: Namespace) -> bool:
    return args.outer_dp_sharding_strategy == "optim"


CONTRADICTIONS: tuple[Contradiction, ...] = (
    Contradiction(
        "--outer-dp-sharding-strategy optim needs --num-distributed-optimizer-instances above 1",
        lambda args: _outer_optim(args) and _instances(args) == 1,
    ),
    Contradiction(
        "--outer-dp-sharding-strategy optim needs --data-parallel-sharding-strategy optim_grads_params",
        lambda args: _outer_optim(args) and args.data_parallel_sharding_strategy not in STRATEGIES_WITH_OUTER_SHARDING,
    ),
    Contradiction(
        "--num-distributed-optimizer-instances above 1 has no meaning with --data-parallel-sharding-strategy no_shard",
        lambda args: _instances(args) > 1 and args.data_parallel_sharding_strategy == "no_shard",
    ),
    Contradiction(
        "--num-distributed-optimizer-instances above 1 needs the package einops, with which Megatron makes its groups",
        lambda args: _instances(args) > 1 and find_spec("einops") is None,
    ),
    Contradiction(
        "--num-distributed-optimizer-instances must divide the number of data-parallel ranks",
        lambda args: _instances(args) < 1 or _data_parallel_ranks(args) % _instances(args) != 0,
    ),
    Contradiction(
        "--init-model-with-meta-device saves nothing with --data-parallel-sharding-strategy no_shard; drop it",
        lambda args: args.init_model_with_meta_device and args.data_parallel_sharding_strategy == "no_shard",
    ),
    Contradiction(
        "--softmax-type learnable with --tensor-model-parallel-size above 1: Megatron does not mark its offsets as cut",
        lambda args: tensor_parallel_ranks(args) > 1 and getattr(args, "softmax_type", "vanilla") == "learnable",
    ),
    Contradiction(
        "--overlap-param-gather needs --overlap-grad-reduce",
        lambda args: args.overlap_param_gather and not args.overlap_grad_reduce,
    ),
)
