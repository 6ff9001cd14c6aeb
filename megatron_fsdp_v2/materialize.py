"""Real memory and initial values for modules built on the meta device."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .sharding.parameter_group import ParamSource


@dataclass(frozen=True)
class Valueless:
    """A parameter or buffer that was on meta and that nothing initialised, by its owner and its name there."""

    name: str
    owner: nn.Module
    attribute: str

    def is_still(self) -> bool:
        """Whether nothing was written to it since."""
        tensor: torch.Tensor | None = self.owner._parameters.get(self.attribute)
        if tensor is None:
            tensor = self.owner._buffers.get(self.attribute)
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return local is not None and bool(local.isnan().any())


def materialize(sources: list[ParamSource], modules: list[nn.Module], device: torch.device) -> list[Valueless]:
    """Give what a unit has on meta memory on ``device``, and initialise it with its module's ``reset_parameters``.

    Only this unit's parameters are whole at that time. Parameters tied within the unit stay tied, what users attached
    to a parameter stays attached, and what was real already keeps its values. What is left without a value, for want
    of ``reset_parameters`` or since that leaves it alone, is filled with NaN and returned, with a warning.

    Args:
        sources: parameters of the unit.
        modules: the modules that hold its parameters and buffers.
        device: where to materialize.

    Raises:
        ValueError: a parameter is a DTensor on meta.
    """
    meta = {source.original: source for source in sources if source.original.is_meta}
    for source in meta.values():
        if isinstance(source.original, DTensor):
            raise ValueError(
                f"parameter {source.name} is a DTensor on the meta device; materialize it before fully_shard"
            )
    valueless = []
    for owner in modules:
        buffers = [name for name, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
        if buffers or any([param in meta for param in owner._parameters.values()]):
            _initialize(owner, meta, device)
            valueless += [Valueless(f"buffer {name}", owner, name) for name in buffers]
    for source in meta.values():
        owner, name = source.owners[0]
        real = owner._parameters[name]
        assert real is not None
        vars(real).update(vars(source.original))
        source.original = real
        for other, alias in source.owners[1:]:
            other._parameters[alias] = real
        if real.is_floating_point():
            valueless.append(Valueless(source.name, owner, name))
    valueless = [entry for entry in valueless if entry.is_still()]
    if valueless:
        warnings.warn(
            f"{', '.join([entry.name for entry in valueless])} came on the meta device, and no reset_parameters() gave "
            "a value; it is NaN until it is initialised or loaded",
            stacklevel=3,
        )
    return valueless


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
            fill = math.nan if buffer.is_floating_point() else 0
            owner._buffers[name] = torch.full_like(buffer, fill, device=device)
    reset = getattr(owner, "reset_parameters", None)
    if callable(reset):
        reset()
    for param, value in real.items():
        param.copy_(value)
