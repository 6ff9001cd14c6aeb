"""Where main weights and main gradients rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .arguments import is_torchs


@dataclass(frozen=True)
class OffloadPolicy:
    """Main weights and gradients rest on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Main weights and gradients rest in CPU memory, where the optimizer steps.

    Attributes:
        pin_memory: page-lock the weights, so that they are copied to an accelerator asynchronously.
    """

    pin_memory: bool = True


class Rest(NamedTuple):
    """Memory apart from that of computing, in which main weights and gradients rest."""

    device: torch.device
    pinned: bool


def rest_of(policy: OffloadPolicy, device: torch.device) -> Rest | None:
    """Where ``policy`` lets main weights rest that are computed with on ``device``; None: in memory of that device."""
    if not isinstance(policy, CPUOffloadPolicy):
        return None
    return Rest(torch.device("cpu"), policy.pin_memory and device.type != "cpu")


def offload_policy_of(policy: object) -> OffloadPolicy:
    """Ours for one of torch's policies of the same name, or ours itself; the plain one for None.

    Raises:
        TypeError: it is neither.
    """
    if policy is None:
        return OffloadPolicy()
    if isinstance(policy, OffloadPolicy):
        return policy
    if is_torchs(policy, "CPUOffloadPolicy"):
        return CPUOffloadPolicy(pin_memory=policy.pin_memory)  # type: ignore[attr-defined]
    if is_torchs(policy, "OffloadPolicy"):
        return OffloadPolicy()
    raise TypeError(f"offload_policy must be an OffloadPolicy, got {type(policy).__name__}")
