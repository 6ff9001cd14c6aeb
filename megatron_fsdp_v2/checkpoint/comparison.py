"""A state dict held against a checkpoint, before anything of either is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_LISTED = 20


@dataclass(frozen=True)
class Differences:
    """Keys that only one side has, and those of which the shapes differ."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)

    def report(self) -> str:
        """One indented line per key, at most 20 of each kind."""
        lines = []
        for title, keys in (
            ("missing in the checkpoint", self.missing),
            ("in the checkpoint only", self.unexpected),
            ("of other shapes", self.reshaped),
        ):
            if keys:
                more = [f"    and {len(keys) - _LISTED} more"] if len(keys) > _LISTED else []
                lines += [f"  {title}:", *(f"    {key}" for key in keys[:_LISTED]), *more]
        return "\n".join(lines)


def compare(
    flat: Mapping[str, Any], saved: Metadata, is_wanted: Callable[[str], bool] = lambda key: True
) -> Differences:
    """What stands between a flat state dict and a checkpoint.

    Args:
        flat: keys as DCP names them and what is to be loaded into.
        saved: metadata of the checkpoint.
        is_wanted: whether a key that only the checkpoint has is one too many.
    """
    entries = saved.state_dict_metadata
    reshaped = []
    for key, value in flat.items():
        entry = entries.get(key)
        if entry is None:
            continue
        kept = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        wanted = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if kept != wanted:
            reshaped.append(f"{key}: {_said(kept)} in the checkpoint, {_said(wanted)} here")
    return Differences(
        missing=tuple(key for key in flat if key not in entries),
        unexpected=tuple(key for key in entries if key not in flat and is_wanted(key)),
        reshaped=tuple(reshaped),
    )


def _said(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else str(shape)
