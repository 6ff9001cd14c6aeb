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


def tensor_parallel_facts(model: Any, optimizer: Any) -> dict[str, Any]:
    """Per parameter: whole shape, shape to compute with, placements, and Megatron's marks at rest and in use."""
    units = [module for module in model.modules() if hasattr(module, "_fsdp_unit")]
    marks = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    names = {parameter: name.replace("module.", "") for name, parameter in model.named_parameters()}
    facts = {}
    model.start_param_sync(force_sync=True)
    for group in [group for unit in units for group in unit._fsdp_unit.groups]:
        for at_rest, in_use in zip(group.sharded_params, group.unsharded_params, strict=True):
            mesh = at_rest.device_mesh.mesh_dim_names
            kinds = {"RowShard": "rows", "Shard": "S({0.dim})", "Replicate": "R"}
            said = [kinds[type(placement).__name__].format(placement) for placement in at_rest.placements]
            values = tuple(getattr(at_rest, mark, False) for mark in marks)
            assert values == tuple(getattr(in_use, mark, False) for mark in marks)
            assert not isinstance(in_use, DTensor)
            placed = ", ".join(f"{axis}: {kind}" for axis, kind in zip(mesh, said, strict=True))
            facts[names[at_rest]] = (tuple(at_rest.shape), tuple(in_use.shape), placed, *values)
    return facts


def repeated_parts(model: Any, optimizer: Any) -> list[str]:
    """Names of the cut weights of which both tensor-parallel ranks begin with the same values."""
    from megatron_fsdp_v2 import full_tensor

    repeated = []
    for name, parameter in model.named_parameters():
        first, second = full_tensor(parameter).detach().chunk(2, dim=max(parameter.partition_dim, 0))
        if parameter.tensor_model_parallel and parameter.ndim == 2 and first.equal(second):
            repeated.append(name)
    return repeated
