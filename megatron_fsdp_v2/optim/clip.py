"""Gradient norms and clipping over parameters on different meshes, with empty shards."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..memory.host_copies import bring_back
from ..sharding.dtensor import comm_device


@torch.no_grad()
def get_total_norm(tensors: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all ``tensors`` taken as one vector; a 0-dim fp32 tensor, the same on every rank.

    Works for DTensors of several meshes, plain tensors (taken as replicated) and shards without any element. Every rank
    has to pass the same tensors in the same order: a collective per set of process groups they are sharded over.

    Args:
        tensors: gradients or parameters.
        norm_type: a positive number, or ``inf``.

    Raises:
        ValueError: ``norm_type`` isn't positive, or a DTensor is partial.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    tensors = list(tensors)
    locals_by_cut: dict[tuple[tuple[int, int], ...], list[torch.Tensor]] = {}
    meshes: dict[tuple[tuple[int, int], ...], tuple[DeviceMesh, list[int]]] = {}
    for tensor in tensors:
        cut: list[int] = []
        if isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                raise ValueError("the norm of a partial DTensor isn't defined by its parts; redistribute it first")
            cut = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
            key = tuple((id(tensor.device_mesh.get_group(dim)), tensor.device_mesh.size(dim)) for dim in cut)
            meshes[key] = (tensor.device_mesh, cut)
            locals_by_cut.setdefault(key, []).append(tensor.to_local())
        else:
            locals_by_cut.setdefault((), []).append(tensor)
    device = _norm_device(tensors)
    total = torch.zeros((), dtype=torch.float32, device=device)
    reduce_op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for key, shards in locals_by_cut.items():
        part = _local_power(shards, norm_type, device)
        if key:
            mesh, cut = meshes[key]
            for dim in cut:
                dist.all_reduce(part, op=reduce_op, group=mesh.get_group(dim))
        total = torch.maximum(total, part) if math.isinf(norm_type) else total + part
    result: torch.Tensor = total if math.isinf(norm_type) else total.pow(1.0 / norm_type)
    return result


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most ``max_norm``; returns the norm before (0-dim, fp32).

    A parameter without a gradient counts as zero. A rank whose shards are all empty takes part all the same, which
    ``torch.nn.utils.clip_grad_norm_`` can't do for ``norm_type=inf``.

    Raises:
        TypeError: ``max_norm`` isn't a number.
        ValueError: ``max_norm`` is negative or not a number, or ``norm_type`` isn't positive.
        RuntimeError: ``error_if_nonfinite`` and the norm is infinite or not a number.
    """
    _check_max_norm(max_norm)
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = get_total_norm([param.grad for param in parameters if param.grad is not None], norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {norm.item()}, so they can't be clipped")
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, total_norm: torch.Tensor
) -> None:
    """Scale gradients as if their total norm were ``total_norm`` (0-dim), so that it is at most ``max_norm``.

    For norms that no list of tensors has by itself. Experts that ranks hold as plain local weights are one such case:
    the norms of the experts of each rank have to be added up over the expert-parallel ranks first.
    """
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    scale = torch.clamp(max_norm / (total_norm + 1e-6), max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in (param.grad for param in parameters if param.grad is not None):
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        bring_back(local)
        if local.numel():
            alike.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), locals_ in alike.items():
        # A 0-dim factor keeps its precision beside tensors of a lower one.
        torch._foreach_mul_(locals_, scale.to(device))


def _norm_device(tensors: list[torch.Tensor]) -> torch.device:
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            return comm_device(tensor.device_mesh)
    return tensors[0].device if tensors else torch.device("cpu")


def _check_max_norm(max_norm: object) -> None:
    if not isinstance(max_norm, (int, float)):
        raise TypeError(f"max_norm must be a number, got {max_norm!r}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm!r}")


def _local_power(shards: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The local sum of powers, or the local maximum for the infinite norm; zero where there is nothing."""
    filled = [shard for shard in shards if shard.numel()]
    for shard in filled:
        bring_back(shard)
    if not filled:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch.stack([torch.linalg.vector_norm(shard, norm_type, dtype=torch.float32) for shard in filled])
    total: torch.Tensor = torch.linalg.vector_norm(norms.to(device), norm_type)
    return total if math.isinf(norm_type) else total.pow(norm_type)
