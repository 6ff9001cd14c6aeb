"""Real memory and initial values for modules built on the meta device."""

from __future__ import annotations

import math
import warnings

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .sharding.parameter_group import ParamSource


def materialize(sources: list[ParamSource], modules: list[nn.Module], device: torch.device) -> None:
    """Give what a unit has on meta memory on ``device``, and initialise it with its module's ``reset_parameters``.

    Only this unit's parameters are whole at that time. Parameters tied within the unit stay tied, what users attached
    to a parameter stays attached, and what was real already keeps its values. A parameter that ``reset_parameters``
    leaves alone is filled with NaN, with a warning.

    Args:
        sources: parameters of the unit.
        modules: the modules that hold its parameters and buffers.
        device: where to materialize.

    Raises:
        ValueError: an owner of a meta tensor has no ``reset_parameters``, or a parameter is a DTensor on meta.
    """
    meta = {source.original: source for source in sources if source.original.is_meta}
    owners = [module for module in modules if _meta_names(module, meta)]
    for source in meta.values():
        if isinstance(source.original, DTensor):
            raise ValueError(
                f"parameter {source.name} is a DTensor on the meta device; materialize it before fully_shard"
            )
    for owner in owners:
        if not callable(getattr(owner, "reset_parameters", None)):
            raise ValueError(
                f"{type(owner).__name__} holds {', '.join(_meta_names(owner, meta))} on the meta device and has no "
                "reset_parameters(); define it, or build the module on a real device"
            )
    for owner in owners:
        _initialize(owner, meta, device)
    for source in meta.values():
        owner, name = source.owners[0]
        real = owner._parameters[name]
        assert real is not None
        vars(real).update(vars(source.original))
        source.original = real
        for other, alias in source.owners[1:]:
            other._parameters[alias] = real
        if real.is_floating_point() and real.isnan().any():
            warnings.warn(
                f"reset_parameters() of {type(owner).__name__} left parameter {source.name} without a value; it is NaN "
                "until something is loaded into it",
                stacklevel=3,
            )


def _meta_names(module: nn.Module, meta: dict[nn.Parameter, ParamSource]) -> list[str]:
    params = [meta[param].name for param in module._parameters.values() if param in meta]
    return params + [
        f"buffer {name}" for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta
    ]


@torch.no_grad()
def _initialize(owner: nn.Module, meta: dict[nn.Parameter, ParamSource], device: torch.device) -> None:
    """Replace meta tensors by real ones and let the module initialise them."""
    real = {param: param.clone() for param in owner._parameters.values() if param is not None and not param.is_meta}
    for name, param in owner._parameters.items():
        if param in meta:
            # Garbage would look like weights; what nothing initialises has to show.
            fill = math.nan if param.is_floating_point() else 0
            empty = torch.full_like(param, fill, device=device)
            owner._parameters[name] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for name, buffer in owner._buffers.items():
        if buffer is not None and buffer.is_meta:
            owner._buffers[name] = torch.empty_like(buffer, device=device)
    owner.reset_parameters()  # type: ignore[operator]
    for param, value in real.items():
        param.copy_(value)
