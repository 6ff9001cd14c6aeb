"""The ways of data parallelism that are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn as nn
from torch.distributed import get_world_size, init_device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_fsdp_v2 import fully_shard

Wrap = Callable[..., nn.Module]


@dataclass(frozen=True)
class Variant:
    """``wrap(model, units)`` applies it over all ranks, ``wrap(model, units, mesh)`` over those of a mesh.

    ``peer`` names the variant it is set against, None for one of the peers.
    """

    name: str
    wrap: Wrap
    peer: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is this project's."""
        return self.name.startswith("v2")


def _shard(
    function: Callable[..., Any],
    options: dict[str, Any],
    model: nn.Module,
    units: list[nn.Module],
    mesh: DeviceMesh | None = None,
) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (get_world_size(),))
    for unit in [*units, model]:
        function(unit, mesh=mesh, **options)
    return model


def _ddp(model: nn.Module, units: list[nn.Module]) -> nn.Module:
    return DistributedDataParallel(model)


def _ours(**options: Any) -> Wrap:
    return partial(_shard, fully_shard, options)


def _theirs(**options: Any) -> Wrap:
    return partial(_shard, torch_fully_shard, options)


# The root reshards too, on both sides: every unit is then gathered once for forward and once for backward.
VARIANTS = (
    Variant("FSDP2", _theirs(reshard_after_forward=True)),
    Variant("v2 ZeRO-3", _ours(reshard_after_forward=True), "FSDP2"),
    Variant("FSDP2, no reshard", _theirs(reshard_after_forward=False)),
    Variant("v2 ZeRO-3, no reshard", _ours(reshard_after_forward=False), "FSDP2, no reshard"),
    Variant("v2 ZeRO-2", _ours(strategy="optim_grads"), "FSDP2, no reshard"),
    Variant("v2 ZeRO-1", _ours(strategy="optim"), "FSDP2, no reshard"),
    Variant("DDP", _ddp),
    Variant("v2 no_shard", _ours(strategy="no_shard"), "DDP"),
)
HOST_VARIANTS = tuple(variant for variant in VARIANTS if variant.name in ("FSDP2", "v2 ZeRO-3"))
