"""What a checkpoint holds besides tensors, read without running any of it."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.serialization import get_unsafe_globals_in_checkpoint

from .errors import CheckpointError


def read_object(stored: bytes, key: str) -> Any:
    """The object that ``torch.save`` wrote as ``stored``, if it is made of plain values, containers and tensors.

    Classes registered with ``torch.serialization.add_safe_globals`` may occur, too. Nothing else is ever called.

    Raises:
        CheckpointError: the object needs other classes, which the message lists, or the bytes are damaged.
    """
    try:
        return torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    # Damaged bytes may fail in any way there is.
    except Exception as error:
        names = _foreign_names(stored)
        why = f"it needs {', '.join(names)}" if names else f"it is damaged ({type(error).__name__})"
        raise CheckpointError(f"{key} can't be read without running code from the checkpoint: {why}") from error


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's usual planner, except that objects are read by `read_object`; takes the same arguments."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        loaded = read_object(value.getvalue(), key)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[key], loaded)
        else:
            self.state_dict[key] = loaded


def _foreign_names(stored: bytes) -> list[str]:
    try:
        return sorted(get_unsafe_globals_in_checkpoint(io.BytesIO(stored)))
    # This looks at a file that is damaged in ways unknown.
    except Exception:
        return []
