"""The entry point: turns a module into a unit."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedParameter

from .arguments import check_positive
from .materialize import materialize
from .module import FSDPModule, named_units, sharded_class
from .precision import MixedPrecisionPolicy
from .runtime.hooks import install
from .runtime.unit import Unit
from .sharding.dtensor import RowShard, build_dtensor
from .sharding.mesh import DataParallelMesh, data_parallel_mesh
from .sharding.parameter_group import ParameterGroup, ParamSource
from .strategy import Strategy, resolve_strategy


@dataclass(frozen=True)
class _Owner:
    """Attribute ``_fsdp_owner`` of a parameter: its unit, its name there, whether it's the one from before sharding."""

    unit: Callable[[], Unit | None]
    name: str
    is_original: bool

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process has no unit.
        return _Owner, (type(None), self.name, self.is_original)


def fully_shard[ModuleT: nn.Module](
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    strategy: str = "optim_grads_params",
    outer_strategy: str = "no_shard",
    grad_reduction: str = "average",
    grad_divisor: float = 1.0,
) -> ModuleT:
    """Shard the parameters of ``module`` that no unit below it owns, and return the module.

    The module's class becomes a subclass that is an ``FSDPModule`` too. Call it on inner modules first, then on the
    outermost one, which becomes the root at its first forward.

    Args:
        module: module with a forward of its own.
        mesh: 1-D (shard) or 2-D (outer, shard) DeviceMesh. None: one shard axis over all ranks.
        reshard_after_forward: free gathered weights between forward and backward. None: True except for the root.
            Without effect where ``strategy`` keeps weights whole.
        shard_placement_fn: as in FSDP2; only ``Shard(0)`` and None can be answered.
        mp_policy: dtypes of weights, gradients and communication. None: those of the parameters.
        ignored_params: parameters left as they are.
        strategy: ``no_shard``, ``optim`` (ZeRO-1), ``optim_grads`` (ZeRO-2) or ``optim_grads_params`` (ZeRO-3).
        outer_strategy: ``no_shard`` (HSDP) or ``optim`` (HFSDP), for the outer axis of a 2-D mesh.
        grad_reduction: ``average`` or ``sum`` over all data-parallel ranks.
        grad_divisor: gradients are divided by this on top.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that can't be honoured; names the argument, or the parameter by its path.
    """
    plan = resolve_strategy(strategy, outer_strategy, isinstance(mesh, DeviceMesh) and mesh.ndim == 2)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    _check_arguments(module, policy, reshard_after_forward, grad_reduction, grad_divisor)
    axes = data_parallel_mesh(mesh)
    if reshard_after_forward and not plan.weights_resharded:
        warnings.warn(
            f"reshard_after_forward=True has no effect: strategy={strategy!r} keeps weights whole", stacklevel=2
        )
    new_class = sharded_class(type(module))
    sources = _sources(module, _ignored(ignored_params))
    _check_sources(module, sources, axes, shard_placement_fn)
    originals = [source.original for source in sources]
    modules = [owner for _, owner in owned_modules(module)]
    materialize(sources, modules, axes.device)
    for source in sources:
        if not isinstance(source.original, DTensor) and source.original.device != axes.device:
            source.original.data = source.original.data.to(axes.device)
    _move_buffers(module, axes.device)
    groups = _groups(sources, axes, plan, policy)
    unit = Unit(module, modules, groups, axes, policy, reshard_after_forward)
    _replace_parameters(unit, sources, originals)
    for group in groups:
        if group.gradients is not None:
            group.gradients.set_reduction(grad_reduction == "average", grad_divisor)
    # Past a __setattr__ of the module's own.
    object.__setattr__(module, "__class__", new_class)
    object.__setattr__(module, "_fsdp_unit", unit)
    install(module, unit, named_units)
    module.register_state_dict_pre_hook(_rest_before_state_dict)  # type: ignore[no-untyped-call]
    module.register_state_dict_post_hook(_copyable_state)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_rest_before_load)  # type: ignore[no-untyped-call]
    return module


def _check_arguments(
    module: object, policy: object, reshard_after_forward: object, grad_reduction: object, grad_divisor: float
) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if isinstance(module, FSDPModule):
        raise ValueError(f"module {type(module).__name__} is a unit already; call fully_shard once per module")
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(f"module {type(module).__name__} is scripted, so its class can't be extended; shard it before")
    if type(module).forward is nn.Module.forward or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"module {type(module).__name__} has no forward to hook; shard the modules it contains")
    if not isinstance(policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a megatron_fsdp_v2.MixedPrecisionPolicy, got {type(policy).__name__}")
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ValueError(f"reshard_after_forward must be True, False or None, got {reshard_after_forward!r}")
    if grad_reduction not in ("average", "sum"):
        raise ValueError(f"grad_reduction must be 'average' or 'sum', got {grad_reduction!r}")
    check_positive("grad_divisor", grad_divisor)


def _ignored(params: object) -> set[nn.Parameter]:
    if params is None:
        return set()
    # A tensor is an iterable of its rows, and a string one of its letters.
    if isinstance(params, (str, torch.Tensor)) or not isinstance(params, Iterable):
        raise TypeError(f"ignored_params must be an iterable of parameters, got {type(params).__name__}")
    found = list(params)
    for param in found:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"ignored_params must hold parameters, not names or values; got {type(param).__name__}")
    return set(found)


def _sources(module: nn.Module, ignored: set[nn.Parameter]) -> list[ParamSource]:
    """Parameters the new unit owns, in registration order; tied ones once, with all their owners."""
    found: dict[nn.Parameter, ParamSource] = {}
    for prefix, owner in owned_modules(module):
        for name, param in owner._parameters.items():
            if param is None or param in ignored:
                continue
            source = found.setdefault(param, ParamSource(f"{prefix}{name}", [], param))
            source.owners.append((owner, name))
    return list(found.values())


def owned_modules(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """(path prefix, module) of the module and those below it that aren't in an inner unit."""
    found = [(prefix, module)]
    seen = {module}

    def descend(parent: nn.Module, path: str) -> None:
        for name, child in parent.named_children():
            if child not in seen and not isinstance(child, FSDPModule):
                seen.add(child)
                found.append((f"{path}{name}.", child))
                descend(child, f"{path}{name}.")

    descend(module, prefix)
    return found


def _check_sources(
    module: nn.Module,
    sources: list[ParamSource],
    axes: DataParallelMesh,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
) -> None:
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn must be a function, got {type(shard_placement_fn).__name__}")
    for source in sources:
        param, name = source.original, f"{type(module).__name__}.{source.name}"
        if isinstance(param, UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet; run a forward of the lazy module before fully_shard")
        _check_owner(module, param, name)
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name} has gradient hooks, which would never be called: autograd sees another parameter "
                "after fully_shard; remove them"
            )
        if param.is_complex() and param.requires_grad:
            raise ValueError(f"parameter {name} is complex; train its torch.view_as_real, or freeze it")
        if param.ndim == 0:
            raise ValueError(f"parameter {name} is a scalar and has no rows to shard; give it the shape (1,)")
        if isinstance(param, DTensor):
            _check_inner_dtensor(param, name, axes)
        elif param.device.type not in ("cpu", "meta", axes.device.type):
            raise ValueError(f"parameter {name} is on {param.device}, the mesh on {axes.device}; move the module first")
        placement = shard_placement_fn(param) if shard_placement_fn else None
        if placement is not None and placement != Shard(0):
            raise ValueError(f"shard_placement_fn answered {placement} for {name}; only rows, Shard(0), can be sharded")


def _check_owner(module: nn.Module, param: nn.Parameter, name: str) -> None:
    """Refuse a parameter that another unit owns, or that a parameter of another unit was made from."""
    mark: _Owner | None = vars(param).get("_fsdp_owner")
    owner = mark.unit() if mark else None
    if mark is None or owner is None:
        return
    paths = [path for path, child in module.named_modules() if getattr(child, "_fsdp_unit", None) is owner]
    other = f"{type(module).__name__}.{paths[0]}.{mark.name}" if paths else f"{owner.name}.{mark.name}"
    if mark.is_original:
        raise ValueError(
            f"parameter {name} is tied to {other}, which belongs to another unit; let one unit own both, by "
            "sharding only the module that contains them"
        )
    raise ValueError(
        f"parameter {name} is sharded already, as {other}; shard inner modules before outer ones, and a module that is "
        "shared only as part of what contains all its uses"
    )


def _check_inner_dtensor(param: DTensor, name: str, axes: DataParallelMesh) -> None:
    if any(isinstance(placement, RowShard) for placement in param.placements):
        raise ValueError(f"parameter {name} is sharded already, by another call of fully_shard")
    if set(param.device_mesh.mesh_dim_names or ("",)) & set(axes.device_mesh.mesh_dim_names or ("",)):
        raise ValueError(
            f"parameter {name} is a DTensor on the mesh {param.device_mesh} already; it can be sharded further only "
            "over another named dimension of the same mesh"
        )
    if any(not placement.is_replicate() and placement != Shard(1) for placement in param.placements):
        raise ValueError(
            f"parameter {name} has placements {param.placements}; only DTensors that are replicated or sharded along "
            "another dimension than the rows can be sharded further"
        )


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for _, owner in owned_modules(module):
        for name, buffer in owner._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                owner._buffers[name] = buffer.to(device)


def _groups(
    sources: list[ParamSource], axes: DataParallelMesh, plan: Strategy, policy: MixedPrecisionPolicy
) -> list[ParameterGroup]:
    """One group per storage dtype and trainability, in order of first appearance."""
    alike: dict[tuple[torch.dtype, bool], list[ParamSource]] = {}
    for source in sources:
        alike.setdefault((source.original.dtype, source.original.requires_grad), []).append(source)
    return [ParameterGroup(members, axes, plan, policy.resolve(dtype)) for (dtype, _), members in alike.items()]


def _replace_parameters(unit: Unit, sources: list[ParamSource], originals: list[nn.Parameter]) -> None:
    by_name = {source.name: (source, original) for source, original in zip(sources, originals, strict=True)}
    for group in unit.groups:
        for name, sharded in zip(group.names, group.sharded_params, strict=True):
            source, original = by_name[name]
            for owner, attribute in source.owners:
                owner._parameters[attribute] = sharded
            # Another module may hold the same parameter: sharding it twice would silently untie the two.
            for param in (original, sharded):
                param._fsdp_owner = _Owner(weakref.ref(unit), name, param is original)  # type: ignore[attr-defined]


def _rest_before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    assert isinstance(module, FSDPModule)
    if module._fsdp_unit.is_bound:
        module.reshard()


def _copyable_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Wrap detached parameters again, so that the state dict can be deep-copied and pickled."""
    for key, value in state_dict.items():
        if key.startswith(prefix) and isinstance(value, DTensor) and value.storage_offset():
            state_dict[key] = build_dtensor(value._local_tensor, value.device_mesh, value.placements, value.shape)


def _rest_before_load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
) -> None:
    assert isinstance(module, FSDPModule)
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            f"load_state_dict(assign=True) would take unit {module._fsdp_unit.name!r} its sharded parameters; "
            "use assign=False, which copies"
        )
    if module._fsdp_unit.is_bound:
        module.reshard()
