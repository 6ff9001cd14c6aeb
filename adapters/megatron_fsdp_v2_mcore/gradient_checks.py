"""What `--check-for-nan-in-loss-and-grad` and `--check-for-large-grads` ask for, on reduced gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.rerun_state_machine import get_rerun_state_machine
from torch import nn
from torch.distributed.tensor import DTensor

# Two runs of a backward may differ by this much where kernels are not deterministic; stock allows the same.
_RERUN_TOLERANCE = 1e-3


def check_gradients(
    ddp_config: DistributedDataParallelConfig, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup
) -> None:
    """Hands the gradients' norm to stock's rerun machine, which re-executes the step or ends the run.

    Every rank of `group` passes the same number, so all of them come to the same verdict.

    Raises:
        RuntimeError: the norm isn't finite and re-runs are disabled; the message names parameters of this rank.
    """
    if not (ddp_config.check_for_nan_in_grad or ddp_config.check_for_large_grads):
        return
    shards = {name: shard for name, parameter in parameters.items() if (shard := local_gradient(parameter)) is not None}
    norm = _sum_over_ranks(list(shards.values()), group)
    machine = get_rerun_state_machine()
    if ddp_config.check_for_nan_in_grad:
        for test, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=norm,
                rejection_func=test,
                message=f"found {what} in the reduced gradients{_culprits(shards, norm)}",
                tolerance=_RERUN_TOLERANCE,
                fatal=True,
            )
    if ddp_config.check_for_large_grads:
        machine.validate_result(
            result=norm,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=10, context="grads"),
            message="found unexpectedly large gradients",
            tolerance=_RERUN_TOLERANCE,
            fatal=False,
        )


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """This rank's rows of the gradient; None without a gradient and without rows."""
    gradient = parameter.grad
    local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local if local is not None and local.numel() else None


def _sum_over_ranks(shards: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """Not the gradient norm where shards are replicated, but finite exactly when every gradient on every rank is."""
    device = shards[0].device if shards else torch.device(group._device_types[0])
    norms = [norm.float() for norm in torch._foreach_norm(shards)] if shards else [torch.zeros((), device=device)]
    total = torch.stack(norms).norm()
    dist.all_reduce(total, group=group)
    return total


def _culprits(shards: Mapping[str, torch.Tensor], norm: torch.Tensor) -> str:
    if torch.isfinite(norm):
        return ""
    names = [name for name, shard in shards.items() if not torch.isfinite(shard).all()]
    return f" of {', '.join(names)}" if names else ", on other ranks"
