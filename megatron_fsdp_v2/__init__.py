"""Sharded data-parallel training for torch."""

from .checkpoint.errors import CheckpointError
from .checkpoint.standalone import load_checkpoint, save_checkpoint
from .explain import explain
from .fully_shard import fully_shard
from .memory.stats import AllocatorStats
from .memory.trace_pool import TracePoolAllocator
from .module import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from .offload import CPUOffloadPolicy, OffloadPolicy
from .optim.clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from .precision import MixedPrecisionPolicy
from .runtime.offloading import OffloadReport
from .sharding.buffer import DataParallelBuffer
from .sharding.dtensor import full_tensor
from .sharding.parameter_group import ParameterGroup

__all__ = [
    "AllocatorStats",
    "CPUOffloadPolicy",
    "CheckpointError",
    "DataParallelBuffer",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OffloadReport",
    "ParameterGroup",
    "TracePoolAllocator",
    "UnshardHandle",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "explain",
    "full_tensor",
    "fully_shard",
    "get_total_norm",
    "load_checkpoint",
    "register_fsdp_forward_method",
    "save_checkpoint",
    "share_comm_ctx",
]
