"""What the adapter's tests look at in a run, before its first step. Called on every rank, inside the rank process."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

# What stock's training loop, schedules, optimizer and logging use of a wrapper.
MEMBERS = (
    *("module", "config", "ddp_config", "force_all_reduce", "set_is_first_microbatch"),
    *("zero_grad_buffer", "no_sync", "start_grad_sync", "finish_grad_sync", "scale_gradients"),
    *("start_param_sync", "synchronize_param_gather", "stop_communication", "broadcast_params"),
    *("state_dict", "state_dict_for_save_checkpoint", "load_state_dict"),
)
# What stock code probes for on its way from the wrapper to the model; it stops at the first object that answers.
PROBED = ("pre_process", "post_process", "vp_stage", "decoder", "set_input_tensor", "model_type", "pg_collection")


def contract(model: Any, optimizer: Any) -> dict[str, Any]:
    """How the wrapper and its parameters look to stock code."""
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_attr_wrapped_model, unwrap_model

    from megatron_fsdp_v2 import FSDPModule

    parameters = dict(model.named_parameters())
    optimizer.reload_model_params()
    return {
        "missing": [name for name in MEMBERS if not hasattr(model, name)],
        "answered early": [name for name in PROBED if hasattr(model, name)],
        "answered by": {type(get_attr_wrapped_model(model, name, return_model_obj=True)).__name__ for name in PROBED},
        "wrapper": isinstance(model, FullyShardedDataParallel),
        "inside": isinstance(model.module, Float16Module),
        "unwrapped": isinstance(unwrap_model(model), GPTModel),
        "optimizer": (type(optimizer).__name__, isinstance(optimizer, DistributedOptimizer)),
        "names": list(parameters),
        "dtensors": all(isinstance(parameter, DTensor) for parameter in parameters.values()),
        "marked": all(getattr(parameter, "__fsdp_param__", False) for parameter in parameters.values()),
        "tensor parallel": sorted(n for n, p in parameters.items() if getattr(p, "tensor_model_parallel", None)),
        "main grads": [name for name, parameter in parameters.items() if hasattr(parameter, "main_grad")],
        "dtypes": {parameter.dtype for parameter in parameters.values()},
        "groups": [(group["wd_mult"], len(group["params"])) for group in optimizer.param_groups],
        "optimized": sum(len(group["params"]) for group in optimizer.param_groups),
        "units": [type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule)],
    }


def units(model: Any, optimizer: Any) -> list[str]:
    """Class names of the units."""
    from megatron_fsdp_v2 import FSDPModule

    return [type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule)]


def initial_weights(model: Any, optimizer: Any) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of every weight before training."""
    from megatron_fsdp_v2 import full_tensor

    weights = {name: full_tensor(parameter).detach().double() for name, parameter in model.named_parameters()}
    return {name: (float(weight.mean()), float(weight.std(correction=0))) for name, weight in weights.items()}


def gradients_before_the_finish(model: Any, optimizer: Any) -> list[tuple[int, int]]:
    """Per step, how many parameters have a reduced gradient before `finish_grad_sync`, and how many after it."""
    counts: list[tuple[int, int]] = []
    finish = model.finish_grad_sync

    def reduced() -> int:
        return sum(parameter.grad is not None for parameter in model.parameters())

    def finish_and_count(*args: Any, **kwargs: Any) -> None:
        before = reduced()
        finish(*args, **kwargs)
        counts.append((before, reduced()))

    model.finish_grad_sync = finish_and_count
    return counts


def state_of_one_rank(model: Any, optimizer: Any) -> None:
    """Gives the last rank a state that others don't have."""
    import torch.distributed as dist

    if dist.get_rank() == dist.get_world_size() - 1:
        inner = (
            optimizer.chained_optimizers[0].optimizer
            if hasattr(optimizer, "chained_optimizers")
            else optimizer.optimizer
        )
        parameter = next(p for group in inner.param_groups for p in group["params"] if p.to_local().numel())
        inner.state[parameter]["odd"] = inner.state[parameter]["exp_avg"].clone()
