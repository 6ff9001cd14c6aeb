"""State and options of a torch optimizer by parameter name, for checkpoints: sharded like the parameters, made without
a step where there is none yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ..sharding.dtensor import build_dtensor
from .chunk_metadata import propagate_chunk_metadata
from .fused import FusedLayout

type State = dict[str, dict[str, Any]]
# What begins the keys of states in a checkpoint; the parameter's name and the state's follow.
STATE_PREFIX = "optimizer.state."


class SavedState(NamedTuple):
    """What a checkpoint holds of one state: global shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def collect_state(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> State:
    """The state of every parameter as ``{parameter name: {state name: value}}``, on the optimizer's own memory.

    States of a parameter's shape are DTensors with its placements, whatever type the optimizer keeps them in or torch
    made of their placement. Others are left as they are: steps as 0-dim tensors, numbers. Optimizers that pass over
    empty tensors have nothing for a rank without rows of a parameter; it gets the names that its neighbours in the
    group have, so that all ranks know the same ones. No communication.

    Args:
        optimizer: any torch optimizer over (some of) the named parameters.
        names: the name of every parameter of the optimizer.

    Raises:
        ValueError: the optimizer has a parameter without a name, or a state of another shape than its parameter's.
    """
    collected: State = {}
    for group in optimizer.param_groups:
        known: Mapping[str, Any] = next((optimizer.state[p] for p in group["params"] if optimizer.state.get(p)), {})
        for parameter in group["params"]:
            name = _name_of(parameter, names)
            state = optimizer.state.get(parameter) or {}
            if not state and known and _local(parameter).numel() == 0:
                state = {key: _empty_like(value, parameter) for key, value in known.items()}
            values = {
                key: _as_sharded(f"optimizer state {name!r} {key!r}", value, parameter)
                for key, value in state.items()
                if value is not None
            }
            if values:
                collected[name] = values
    return collected


def keys_that_may_lack(parameters: Mapping[str, nn.Parameter], fused: Mapping[str, FusedLayout]) -> list[str]:
    """How the keys begin of states that this rank may not have: those of parameters it holds nothing of."""
    empty = [name for name, parameter in parameters.items() if _local(parameter).numel() == 0]
    parts = [f"{name}{part}" for name in empty if name in fused for part, _ in fused[name].components]
    return [f"{STATE_PREFIX}{name}." for name in (*empty, *parts)]


def saved_states(
    metadata: Metadata, shapes: Mapping[str, tuple[int, ...]], fused: Mapping[str, FusedLayout]
) -> dict[str, dict[str, SavedState]]:
    """The tensors that a checkpoint holds of optimizers, ``{parameter name: {state name: ...}}``.

    Args:
        shapes: the global shape of every fused parameter here, by name.
        fused: the parameters that the checkpoint holds matrix by matrix, as one state each.
    """
    whole = {f"{name}{part}": name for name, layout in fused.items() for part, _ in layout.components}
    states: dict[str, dict[str, SavedState]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not key.startswith(STATE_PREFIX) or not isinstance(entry, TensorStorageMetadata):
            continue
        name, _, state = key.removeprefix(STATE_PREFIX).rpartition(".")
        shape = shapes[whole[name]] if name in whole else tuple(entry.size)
        states.setdefault(whole.get(name, name), {})[state] = SavedState(shape, entry.properties.dtype)
    return states


def create_state(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Mapping[str, Mapping[str, SavedState]],
) -> None:
    """Give parameters that have no state yet what a checkpoint holds for them, as zeros to load into.

    No step is made: weights, and counts of steps in the groups, stay as they are. Parameters that have state keep it.

    Args:
        optimizer: any torch optimizer over (some of) the named parameters.
        names: the name of every parameter of the optimizer.
        saved: per parameter name and state name what the checkpoint holds.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state.get(parameter):
                continue
            device = parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
            entries = saved.get(_name_of(parameter, names), {})
            state = {key: _zeros(entry, parameter, device) for key, entry in entries.items()}
            if state:
                optimizer.state[parameter] = state


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Every group's options without its parameters: numbers, strings, booleans, None and lists of those.

    A 0-dim tensor, such as a learning rate that a graph reads, is its number.
    """
    return [
        {key: _plain(value) for key, value in group.items() if key != "params" and _is_plain(_plain(value))}
        for group in optimizer.param_groups
    ]


def restore_group_options(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Write saved options into a group. A tensor keeps its memory, a tuple its type; options unknown here are added."""
    for key, value in saved.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, Sequence) and isinstance(present, tuple) else value


def _name_of(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    try:
        return names[parameter]
    except KeyError:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in the model"
        ) from None


def _as_sharded(name: str, value: Any, parameter: torch.Tensor) -> Any:
    """``value`` as a DTensor like the parameter, if it has a number for every one that this rank holds of it."""
    if not isinstance(value, torch.Tensor) or not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    local = _local(value)
    if local.shape == parameter._local_tensor.shape:
        # The optimizer's own tensor stays free of what checkpoints attach: users copy and pickle it.
        state = build_dtensor(local.detach(), parameter.device_mesh, parameter.placements, parameter.shape)
        return propagate_chunk_metadata(state, parameter)
    if value.numel() == 1:
        return value
    raise ValueError(
        f"{name} is of shape {tuple(local.shape)} on this rank, which holds {tuple(parameter._local_tensor.shape)} of "
        f"the parameter {tuple(parameter.shape)}: only state of a parameter's shape is sharded, and can be saved"
    )


def _empty_like(value: Any, parameter: torch.Tensor) -> Any:
    """A neighbour's state as it would be for a parameter this rank holds nothing of."""
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return torch.zeros_like(_local(parameter), dtype=value.dtype)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _zeros(saved: SavedState, parameter: torch.Tensor, scalar_device: torch.device) -> torch.Tensor:
    # State of a parameter of another size gets this one's, too: it is compared with the checkpoint before it is loaded.
    if saved.shape == tuple(parameter.shape) or math.prod(saved.shape) != 1:
        # As torch's own optimizers do when they load: floating-point state has its parameter's dtype.
        dtype = parameter.dtype if saved.dtype.is_floating_point else saved.dtype
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(saved.shape, dtype=saved.dtype, device=scalar_device)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, (bool, int, float, str))
