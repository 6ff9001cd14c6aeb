"""The entry point: turns a module into a unit."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.nn.parameter import UninitializedParameter

from .arguments import check_reduction, check_reshard
from .materialize import materialize
from .module import FSDPModule, sharded_class
from .offload import OffloadPolicy, Rest, offload_policy_of, rest_of
from .precision import MixedPrecisionPolicy, mixed_precision_policy
from .runtime.compilation import keep_out_of_graphs
from .runtime.unit import Unit
from .sharding.dtensor import build_dtensor
from .sharding.inner import check_inner_spec, spec_of_part
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


def fully_shard[ModuleT: nn.Module | list[nn.Module]](
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    inner_sharding_fn: Callable[[nn.Parameter], tuple[DeviceMesh, Sequence[Placement]] | None] | None = None,
    strategy: str = "optim_grads_params",
    outer_strategy: str = "no_shard",
    grad_reduction: str = "average",
    grad_divisor: float = 1.0,
) -> ModuleT:
    """Shard the parameters of ``module`` that no unit below it owns, and return the module.

    The module's class becomes a subclass that is an ``FSDPModule`` too. Call it on inner modules first, then on the
    outermost one, which becomes the root at its first forward.

    Args:
        module: module with a forward of its own, or a list of such, which become one unit: gathered before the first
            of them runs and freed after the last.
        mesh: 1-D (shard) or 2-D (outer, shard) DeviceMesh. None: one shard axis over all ranks.
        reshard_after_forward: free gathered weights between forward and backward. None: True except for the root.
            A number: keep the part that the rank holds when so many neighbours on the shard axis share the weights, so
            that backward gathers among those alone. Without effect where ``strategy`` keeps weights whole.
        shard_placement_fn: as in FSDP2; only ``Shard(0)`` and None can be answered.
        mp_policy: dtypes of weights, gradients and communication, ours or torch's. None: those of the parameters.
        offload_policy: where main weights and gradients rest, as in FSDP2.
        ignored_params: parameters left as they are.
        dp_mesh_dims: of FSDP2; refused, since ``mesh`` is the data-parallel one alone.
        inner_sharding_fn: answers, for a plain parameter that is this rank's part of a larger one, over which mesh and
            by which placements that was cut, evenly: a dimension of the root mesh that isn't data-parallel. At rest the
            parameter is the larger one; modules compute with their plain part as before. None: it's whole.
        strategy: ``no_shard``, ``optim`` (ZeRO-1), ``optim_grads`` (ZeRO-2) or ``optim_grads_params`` (ZeRO-3).
        outer_strategy: ``no_shard`` (HSDP) or ``optim`` (HFSDP), for the outer axis of a 2-D mesh.
        grad_reduction: ``average`` or ``sum`` over all data-parallel ranks.
        grad_divisor: gradients are divided by this on top.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has a value that can't be honoured; names the argument, or the parameter by its path.
    """
    plan = resolve_strategy(strategy, outer_strategy, isinstance(mesh, DeviceMesh) and mesh.ndim == 2)
    modules = _modules(module)
    policy = mixed_precision_policy(mp_policy)
    check_reduction(grad_reduction, grad_divisor)
    offload = offload_policy_of(offload_policy)
    if dp_mesh_dims is not None:
        raise ValueError("dp_mesh_dims can't be honoured; pass the data-parallel part of the mesh, such as mesh['dp']")
    axes = data_parallel_mesh(mesh)
    reshard = check_reshard(reshard_after_forward, axes.shard.size)
    if reshard and not plan.weights_resharded:
        warnings.warn(
            f"reshard_after_forward={reshard_after_forward} has no effect: strategy={strategy!r} keeps weights whole",
            stacklevel=2,
        )
    classes = [sharded_class(type(member)) for member in modules]
    sources = _sources(modules, _ignored(ignored_params), inner_sharding_fn)
    _check_sources(modules, sources, axes, shard_placement_fn)
    originals = [source.original for source in sources]
    owners = [owner for _, owner in owned_modules(modules)]
    valueless = materialize(sources, owners, axes.device)
    _move_to_device(sources, owners, axes.device)
    groups = _groups(sources, axes, plan, policy, rest_of(offload, axes.device))
    unit = Unit(modules, owners, groups, axes, policy, reshard)
    _replace_parameters(unit, sources, originals)
    unit.valueless = valueless
    for group in unit.groups:
        if group.gradients is not None:
            group.gradients.set_reduction(grad_reduction == "average", grad_divisor)
    keep_out_of_graphs(FSDPModule.__call__)
    for member, new_class in zip(modules, classes, strict=True):
        _make_sharded(member, new_class, unit)
    return module


def _modules(module: object) -> list[nn.Module]:
    """The modules of the new unit."""
    modules = module if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ValueError("module is an empty list; pass at least one module")
    for member in modules:
        if not isinstance(member, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module or a list of them, got {type(member).__name__}")
        name = type(member).__name__
        if isinstance(member, FSDPModule):
            raise ValueError(f"module {name} is a unit already; call fully_shard once per module")
        if isinstance(member, torch.jit.ScriptModule):
            raise ValueError(f"module {name} is scripted, so its class can't be extended; shard it before")
        if type(member).forward is nn.Module.forward or isinstance(member, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(f"module {name} has no forward to hook; shard the modules it contains")
    if len(set(modules)) < len(modules):
        raise ValueError("module holds the same module twice")
    return list(modules)


def _make_sharded(module: nn.Module, new_class: type[nn.Module], unit: Unit) -> None:
    # Past a __setattr__ of the module's own.
    object.__setattr__(module, "__class__", new_class)
    object.__setattr__(module, "_fsdp_unit", unit)
    module.register_state_dict_pre_hook(_rest_before_state_dict)
    module.register_state_dict_post_hook(_copyable_state)
    module.register_load_state_dict_pre_hook(_rest_before_load)


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


def _sources(
    modules: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    inner_sharding_fn: Callable[[nn.Parameter], object] | None,
) -> list[ParamSource]:
    """Parameters the new unit owns, in registration order; tied ones once, with all their owners."""
    if inner_sharding_fn is not None and not callable(inner_sharding_fn):
        raise TypeError(f"inner_sharding_fn must be a function, got {type(inner_sharding_fn).__name__}")
    found: dict[nn.Parameter, ParamSource] = {}
    for prefix, owner in owned_modules(modules):
        for name, param in owner._parameters.items():
            if param is None or param in ignored:
                continue
            source = found.setdefault(param, ParamSource(f"{prefix}{name}", [], param))
            source.owners.append((owner, name))
    if inner_sharding_fn is not None:
        holder = _holder(modules)
        for param, source in found.items():
            source.declared = spec_of_part(param, inner_sharding_fn(param), f"{holder}.{source.name}")
    return list(found.values())


def owned_modules(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """(path prefix, module) of the modules and those below them that aren't in an inner unit.

    Paths begin with a module's index where there are several.
    """
    found: list[tuple[str, nn.Module]] = []
    seen = set(modules)

    def descend(parent: nn.Module, path: str) -> None:
        found.append((path, parent))
        for name, child in parent.named_children():
            if child not in seen and not isinstance(child, FSDPModule):
                seen.add(child)
                descend(child, f"{path}{name}.")

    for index, module in enumerate(modules):
        descend(module, f"{index}." if len(modules) > 1 else "")
    return found


def _check_sources(
    modules: Sequence[nn.Module],
    sources: list[ParamSource],
    axes: DataParallelMesh,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
) -> None:
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn must be a function, got {type(shard_placement_fn).__name__}")
    holder = _holder(modules)
    for source in sources:
        param, name = source.original, f"{holder}.{source.name}"
        if isinstance(param, UninitializedParameter):
            raise ValueError(f"parameter {name} has no shape yet; run a forward of the lazy module before fully_shard")
        _check_owner(modules, param, name)
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"parameter {name} has gradient hooks, which would never be called: autograd sees another parameter "
                "after fully_shard; remove them"
            )
        if param.is_complex() and param.requires_grad:
            raise ValueError(f"parameter {name} is complex; train its torch.view_as_real, or freeze it")
        if param.ndim == 0:
            raise ValueError(f"parameter {name} is a scalar and has no rows to shard; give it the shape (1,)")
        if source.inner_spec is not None:
            check_inner_spec(source.inner_spec, name, axes)
        if not isinstance(param, DTensor) and param.device.type not in ("cpu", "meta", axes.device.type):
            raise ValueError(f"parameter {name} is on {param.device}, the mesh on {axes.device}; move the module first")
        placement = shard_placement_fn(param) if shard_placement_fn else None
        if placement is not None and placement != Shard(0):
            raise ValueError(f"shard_placement_fn answered {placement} for {name}; only rows, Shard(0), can be sharded")


def _holder(modules: Sequence[nn.Module]) -> str:
    return type(modules[0]).__name__ if len(modules) == 1 else "module"


def _check_owner(modules: Sequence[nn.Module], param: nn.Parameter, name: str) -> None:
    """Refuse a parameter that another unit owns, or that a parameter of another unit was made from."""
    mark: _Owner | None = vars(param).get("_fsdp_owner")
    owner = mark.unit() if mark else None
    if mark is None or owner is None:
        return
    within = [pair for module in modules for pair in module.named_modules()]
    paths = [path for path, child in within if getattr(child, "_fsdp_unit", None) is owner]
    other = f"{_holder(modules)}.{paths[0]}.{mark.name}" if paths else f"{owner.name}.{mark.name}"
    if mark.is_original:
        raise ValueError(
            f"parameter {name} is tied to {other}, which belongs to another unit; let one unit own both, by "
            "sharding only the module that contains them"
        )
    raise ValueError(
        f"parameter {name} is sharded already, as {other}; shard inner modules before outer ones, and a module that is "
        "shared only as part of what contains all its uses"
    )


def _move_to_device(sources: Sequence[ParamSource], owners: Sequence[nn.Module], device: torch.device) -> None:
    for source in sources:
        if not isinstance(source.original, DTensor) and source.original.device != device:
            source.original.data = source.original.data.to(device)
    for owner in owners:
        for name, buffer in owner._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                owner._buffers[name] = buffer.to(device)


def _groups(
    sources: list[ParamSource],
    axes: DataParallelMesh,
    plan: Strategy,
    policy: MixedPrecisionPolicy,
    rest: Rest | None,
) -> list[ParameterGroup]:
    """One group per storage dtype and trainability, in order of first appearance."""
    alike: dict[tuple[torch.dtype, bool], list[ParamSource]] = {}
    for source in sources:
        alike.setdefault((source.original.dtype, source.original.requires_grad), []).append(source)
    return [ParameterGroup(members, axes, plan, policy.resolve(dtype), rest) for (dtype, _), members in alike.items()]


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


def _bring_to_rest(module: FSDPModule) -> None:
    """Show parameters as they are at rest, in memory of the device."""
    if module._fsdp_unit.is_bound:
        module.reshard()
    module._fsdp_unit.host_copies.give_back()


def _rest_before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    assert isinstance(module, FSDPModule)
    _bring_to_rest(module)


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
    _bring_to_rest(module)
    for name, param in module.named_parameters():
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor) and isinstance(param, DTensor) and value.placements == param.placements:
            # torch takes the two for cut alike, and would even spread one row over several.
            loaded, held = value.to_local().shape, param.to_local().shape
            if loaded != held:
                raise ValueError(
                    f"{prefix}{name} has a shard of shape {tuple(loaded)}, where this rank holds {tuple(held)}: it was "
                    "cut evenly, as by distribute_tensor; distribute it as Replicate() and redistribute it to the "
                    "placements of the parameter"
                )
