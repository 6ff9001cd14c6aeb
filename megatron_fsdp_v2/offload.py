"""Where main weights and main gradients rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadPolicy:
    """Main weights and gradients rest on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Main weights and gradients rest in CPU memory, where the optimizer steps.

    Attributes:
        pin_memory: page-lock that memory, so that copies from and to an accelerator are asynchronous.
    """

    pin_memory: bool = True


def offload_policy_of(policy: object) -> OffloadPolicy:
    """Ours for one of torch's policies of the same name, or ours itself; the plain one for None.

    Raises:
        TypeError: it is neither.
    """
    if policy is None:
        return OffloadPolicy()
    if isinstance(policy, OffloadPolicy):
        return policy
    kind = type(policy)
    if kind.__module__.startswith("torch.distributed.fsdp"):
        if kind.__name__ == "CPUOffloadPolicy":
            return CPUOffloadPolicy(pin_memory=policy.pin_memory)  # type: ignore[attr-defined]
        if kind.__name__ == "OffloadPolicy":
            return OffloadPolicy()
    raise TypeError(f"offload_policy must be an OffloadPolicy, got {kind.__name__}")
