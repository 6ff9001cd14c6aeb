"""Options of optimizer groups in a checkpoint, found again by the names of the parameters they are for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import CheckpointError
from .optimizer_state import group_options, restore_group_options

KEY = "optimizer.param_groups"
_PARAMS = "params"
# Not options; torch keeps the latter where an optimizer was given named parameters.
_NAMES = (_PARAMS, "param_names")

type Matched = list[tuple[dict[str, Any], Mapping[str, Any]]]


def options_text(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str]) -> str:
    """The options of all groups as JSON: a list of objects, with the names of a group's parameters under ``params``."""
    saved = []
    for optimizer in optimizers:
        for group, options in zip(optimizer.param_groups, group_options(optimizer), strict=True):
            saved.append({**_without_names(options), _PARAMS: [names[parameter] for parameter in group[_PARAMS]]})
    return json.dumps(saved)


def match_options(
    text: Any, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[nn.Parameter, str], strict: bool
) -> Matched:
    """Every group with the options to restore into it. Changes nothing.

    Args:
        text: what the checkpoint holds; see `options_text`. A single group without names is for all parameters.
        strict: whether a group none of whose parameters had options is an error. It keeps its own otherwise.

    Raises:
        CheckpointError: the text is damaged, or options of a group's parameters differ in the checkpoint.
    """
    saved = _parsed(text)
    by_name = {name: options for options in saved for name in options.get(_PARAMS, ())}
    common = saved[0] if len(saved) == 1 and _PARAMS not in saved[0] else None
    matched: Matched = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            wanted = [names[parameter] for parameter in group[_PARAMS]]
            options = common or _common_options(wanted, by_name)
            if options is not None:
                matched.append((group, options))
            elif wanted and strict:
                raise CheckpointError(
                    f"the checkpoint has no options for the group of {_some(wanted)}; strict=False keeps its own"
                )
    return matched


def restore_options(matched: Matched) -> None:
    """Writes what `match_options` found into the groups."""
    for group, options in matched:
        restore_group_options(group, _without_names(options))


def _common_options(names: Sequence[str], saved: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    found = {name: _without_names(saved[name]) for name in names if name in saved}
    if not found:
        return None
    first, options = next(iter(found.items()))
    for name, other in found.items():
        if other != options:
            keys = sorted(key for key in options.keys() | other.keys() if options.get(key) != other.get(key))
            raise CheckpointError(
                f"{first} and {name} are in one group here and had different options in the checkpoint "
                f"({', '.join(keys)}): group the parameters as they were"
            )
    return options


def _without_names(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in _NAMES}


def _parsed(text: Any) -> list[dict[str, Any]]:
    try:
        saved = json.loads(text)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{KEY} is no JSON text: {error}") from error
    if not isinstance(saved, list) or not all(isinstance(options, dict) for options in saved):
        raise CheckpointError(f"{KEY} is no list of options")
    return saved


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
