"""Sharded data-parallel training for torch."""

from .fully_shard import fully_shard
from .module import FSDPModule, UnshardHandle
from .optim.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from .precision import MixedPrecisionPolicy
from .sharding.buffer import DataParallelBuffer
from .sharding.dtensor import full_tensor
from .sharding.parameter_group import ParameterGroup

__all__ = [
    "DataParallelBuffer",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "ParameterGroup",
    "UnshardHandle",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "full_tensor",
    "fully_shard",
    "get_total_norm",
]
