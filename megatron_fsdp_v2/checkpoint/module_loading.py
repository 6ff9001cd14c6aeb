"""What modules do with loaded values beyond holding them in memory, after that memory was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .subject import bare_name

_OURS = __name__.partition(".")[0]


def hand_over(model: nn.Module, loaded: Mapping[str, Any]) -> None:
    """Lets modules load what was written into their memory, where loading is more than that.

    Those are modules with a way of their own to load, and with hooks; all below them is handed over. Of others it is
    values that aren't their parameters and buffers: extra state, and what a hook made for the state dict.

    Args:
        loaded: by the names of a state dict, without those of wrappers.
    """
    special = {bare_name(name) for name, module in model.named_modules() if _loads_its_own_way(module)}
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        special.add("")
    places = {bare_name(name): tensor for name, tensor in _memory_of(model)}
    wanted = {
        name: value
        for name, value in loaded.items()
        if not _is_same_memory(value, places.get(name)) or any(path in special for path in _above(name))
    }
    if wanted or special:
        names = {bare_name(name): name for name in model.state_dict()}
        model.load_state_dict({names[name]: value for name, value in wanted.items() if name in names}, strict=False)


def _loads_its_own_way(module: nn.Module) -> bool:
    if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
        return True
    hooks = [*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()]
    # A unit's own are checks of what is handed over.
    return any([getattr(hook, "__module__", "").partition(".")[0] != _OURS for hook in hooks])


def _memory_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _is_same_memory(value: Any, place: torch.Tensor | None) -> bool:
    if not isinstance(value, torch.Tensor) or place is None:
        return False
    ours, theirs = _local(value), _local(place)
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    # Tensors of other kinds may hide their memory, and say 0.
    return ours.numel() == 0 or ours.data_ptr() == theirs.data_ptr() != 0


def _above(name: str) -> Iterator[str]:
    """The paths of the modules that a name is below."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
