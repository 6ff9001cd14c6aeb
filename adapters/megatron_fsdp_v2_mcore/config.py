"""The data-parallel configuration that carries our settings through stock code."""

from __future__ import annotations

import dataclasses
import functools
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

from megatron_fsdp_v2 import MixedPrecisionPolicy
from megatron_fsdp_v2.runtime.agreement import Mode

from .arguments import asks_for_v2


@dataclass
class FSDPv2DDPConfig(DistributedDataParallelConfig):
    """Stock's configuration, and what only v2 knows. `fsdp_unit_modules` empty means the default units."""

    use_megatron_fsdp_v2: bool = True
    fsdp_unit_modules: tuple[str, ...] = ()
    fsdp_check_ranks: Mode = "first_step"


def wrap_get_megatron_ddp_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Turns the configuration stock makes from the arguments into ours when the run asked for v2."""

    @functools.wraps(original)
    def get_megatron_ddp_config(args: Namespace) -> DistributedDataParallelConfig:
        stock: DistributedDataParallelConfig = original(args)
        if not asks_for_v2(args):
            return stock
        values = {field.name: getattr(stock, field.name) for field in dataclasses.fields(stock)}
        return FSDPv2DDPConfig(
            **values,
            fsdp_unit_modules=tuple(args.fsdp_unit_modules),
            fsdp_check_ranks=args.fsdp_check_ranks.replace("-", "_"),
        )

    return get_megatron_ddp_config


def wants_v2(ddp_config: object) -> bool:
    """Whether this configuration chose our wrapper and optimizer. Any object may be asked."""
    return bool(getattr(ddp_config, "use_megatron_fsdp_v2", False))


def mixed_precision_policy(ddp_config: DistributedDataParallelConfig) -> MixedPrecisionPolicy:
    """Dtypes of main weights, main gradients and gradient communication; None stands for the model's own dtype.

    The model is computed with as stock hands it over, its parameters already cast to `params_dtype`.
    """
    main_grads = ddp_config.megatron_fsdp_main_grads_dtype
    if main_grads is None and ddp_config.grad_reduce_in_fp32:
        main_grads = torch.float32
    return MixedPrecisionPolicy(
        cast_forward_inputs=False,
        main_params_dtype=ddp_config.megatron_fsdp_main_params_dtype,
        main_grads_dtype=main_grads,
        grad_comm_dtype=ddp_config.megatron_fsdp_grad_comm_dtype,
    )
