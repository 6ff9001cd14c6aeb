"""Real memory and initial values for modules built on the meta device."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .sharding.parameter_group import ParamSource


def materialize(module: nn.Module, sources: list[ParamSource], device: torch.device) -> None:
    """Give meta parameters of a unit memory on ``device`` and initialise them with their module's ``reset_parameters``.

    Only this unit's parameters are whole at that time. Parameters tied within the unit stay tied, and what users
    attached to a parameter stays attached.

    Raises:
        ValueError: an owner of a meta parameter has no ``reset_parameters``, or a parameter is a DTensor on meta.
    """
    meta = [source for source in sources if source.original.is_meta]
    owners = list(dict.fromkeys(owner for source in meta for owner, _ in source.owners))
    for source in meta:
        if isinstance(source.original, DTensor):
            raise ValueError(f"parameter {source.name} is a DTensor on meta; materialize it before fully_shard")
    for owner in owners:
        if not callable(getattr(owner, "reset_parameters", None)):
            named = [source.name for source in meta for candidate, _ in source.owners if candidate is owner]
            raise ValueError(
                f"{type(owner).__name__} holds meta parameters ({', '.join(named)}) and has no reset_parameters(); "
                "define it, or build the module on a real device"
            )
    for owner in owners:
        owner.to_empty(device=device, recurse=False)
        with torch.no_grad():
            owner.reset_parameters()  # type: ignore[operator]
    for source in meta:
        owner, name = source.owners[0]
        real = owner._parameters[name]
        assert real is not None
        vars(real).update(vars(source.original))
        real.requires_grad_(source.original.requires_grad)
        source.original = real
        for other, alias in source.owners[1:]:
            other._parameters[alias] = real
