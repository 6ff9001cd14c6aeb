"""A state dict held against a checkpoint, before anything of either is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

_LISTED = 20

type Shape = tuple[int, ...] | None


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
    wanted = {key: tuple(value.shape) if isinstance(value, torch.Tensor) else None for key, value in flat.items()}
    kept = {
        key: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        for key, entry in saved.state_dict_metadata.items()
        if key in flat or is_wanted(key)
    }
    return compare_shapes(wanted, kept)


def compare_shapes(
    wanted: Mapping[str, Shape], kept: Mapping[str, Shape], places: tuple[str, str] = ("here", "in the checkpoint")
) -> Differences:
    """What stands between the shapes that are wanted and those that are kept; None is the shape of what is no tensor.

    Args:
        places: of both, as a report says it.
    """
    return Differences(
        missing=tuple(key for key in wanted if key not in kept),
        unexpected=tuple(key for key in kept if key not in wanted),
        reshaped=tuple(
            f"{key}: {_said(kept[key])} {places[1]}, {_said(shape)} {places[0]}"
            for key, shape in wanted.items()
            if key in kept and kept[key] != shape
        ),
    )


def _said(shape: Shape) -> str:
    return "no tensor" if shape is None else str(shape)
