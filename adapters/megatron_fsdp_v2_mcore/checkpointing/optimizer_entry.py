"""The optimizer's part of a state dict: state by parameter name, options of the groups as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import nn

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.group_options import options_text
from megatron_fsdp_v2.checkpoint.optimizer_state import (
    SavedState,
    collect_state,
    create_state,
    restore_group_options,
)

STATE = "state"
# Text, because a list of dicts would become one entry per option, and a pickle would have to be trusted.
GROUPS = "param_groups"
# Of a dynamic loss scale; absent otherwise.
SCALER = "grad_scaler"


def optimizer_entry(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """State and group options of an optimizer as a state dict entry, on the optimizer's own memory."""
    return {STATE: collect_state(optimizer, names), GROUPS: options_text([optimizer], names)}


def create_missing_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Mapping[str, Mapping[str, SavedState]],
) -> None:
    """Gives parameters without state what the checkpoint holds for them, without a step.

    Fused optimizers make their own: they keep other kinds of tensors than torch's.
    """
    initialize = getattr(optimizer, "initialize_state", None)
    if initialize is None:
        create_state(optimizer, names, saved)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if saved.get(names[parameter]) and not optimizer.state.get(parameter):
                initialize(parameter, False)


def restore_groups(optimizer: torch.optim.Optimizer, text: str) -> None:
    """Writes saved options into the groups that stock would take for the same ones.

    Raises:
        CheckpointError: a group has no counterpart among the saved ones.
    """
    restore_options(optimizer, json.loads(text))


def restore_options(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """As `restore_groups`, from the options themselves."""
    saved = {_identity(options): options for options in groups}
    wanted = [_identity(group) for group in optimizer.param_groups]
    if missing := [identity for identity in wanted if identity not in saved]:
        raise CheckpointError(
            f"the checkpoint has no parameter group with {_described(missing[0])}; it has "
            f"{'; '.join(map(_described, saved)) or 'none'}. Give --no-load-optim to start with a new optimizer"
        )
    for group, identity in zip(optimizer.param_groups, wanted, strict=True):
        restore_group_options(group, {key: value for key, value in saved[identity].items() if key != "params"})


def _identity(options: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(options.get(key) for key in param_group_identifier_keys)


def _described(identity: tuple[Any, ...]) -> str:
    pairs = zip(param_group_identifier_keys, identity, strict=True)
    return ", ".join(f"{key}={value}" for key, value in pairs if value is not None)
