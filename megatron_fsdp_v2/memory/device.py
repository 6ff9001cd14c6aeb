"""What taking memory for a pool asks of a device."""

from __future__ import annotations

from typing import Any

import torch


def settle(device: torch.device) -> None:
    """Wait for all work given to a device and hand its cached memory back, so that new memory comes from the whole."""
    module = _module(device)
    for name in ("synchronize", "empty_cache"):
        getattr(module, name, _nothing)()


def refuse_in_graphs(action: str, device: torch.device) -> None:
    """Refuse what a graph would repeat, or can't hold.

    Raises:
        RuntimeError: a device graph is being captured, or torch.compile traces.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(f"can't {action} inside a torch.compile graph; keep fully_shard's calls out of it")
    if getattr(_module(device), "is_current_stream_capturing", _nothing)():
        raise RuntimeError(
            f"can't {action} while a device graph is captured; run a step like those to come before the capture"
        )


def _module(device: torch.device) -> Any:
    return getattr(torch, device.type, None)


def _nothing() -> bool:
    return False
