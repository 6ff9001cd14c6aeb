"""What is saved or loaded together: a model, its optimizers, and what checkpoints have to know about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..module import FSDPModule
from .fused import FusedLayout, split_weights

type Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
# What wrappers of torch put into the names of parameters.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Subject:
    """A model, sharded or not, with optimizers over its parameters and the layouts of its fused ones, by name."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    fused: Mapping[str, FusedLayout]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizers, fused: Mapping[str, FusedLayout] | None) -> Subject:
        """Checks the arguments of a save or load.

        Raises:
            TypeError: one isn't a module, an optimizer, or a layout.
            ValueError: parameters are on the meta device; an optimizer has some that aren't the model's, or that
                another one has; a layout is of no parameter or doesn't fit it.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch module, got {type(model).__name__}")
        subject = cls(model, _optimizers(optimizer), dict(fused or {}))
        subject._check()
        return subject

    def names(self) -> dict[nn.Parameter, str]:
        """The name of every parameter. Units are brought to rest, and back to the device with their optimizer state."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                if module._fsdp_unit.is_bound:
                    module.reshard()
                module._fsdp_unit.host_copies.give_back()
        return {parameter: bare_name(name) for name, parameter in self.model.named_parameters()}

    def mark_loaded(self) -> None:
        """Lets the next forward see weights that were written in place."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.mark_weights_updated()

    def _check(self) -> None:
        names = self.names()
        if on_meta := [name for parameter, name in names.items() if parameter.is_meta]:
            raise ValueError(f"parameter {on_meta[0]!r} is on the meta device: give the model memory first")
        seen: set[nn.Parameter] = set()
        for optimizer in self.optimizers:
            parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            for parameter in parameters:
                if parameter not in names:
                    raise ValueError(
                        f"the optimizer has a parameter of shape {tuple(parameter.shape)} not in the model"
                    )
            if twice := parameters & seen:
                raise ValueError(f"parameter {names[twice.pop()]!r} is in several optimizers")
            seen |= parameters
        by_name = {name: parameter.detach() for parameter, name in names.items()}
        for name, layout in self.fused.items():
            if not isinstance(layout, FusedLayout):
                raise TypeError(f"fused[{name!r}] must be a FusedLayout, got {type(layout).__name__}")
            if name not in by_name:
                raise ValueError(f"fused names {name!r}, which is no parameter of the model")
            split_weights({name: by_name[name]}, {name: layout})


def bare_name(name: str) -> str:
    """A name of the model's as it is without torch.compile and activation checkpointing around modules."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _optimizers(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    optimizers = () if given is None else tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer, several or None, got {type(optimizer).__name__}")
    return optimizers
