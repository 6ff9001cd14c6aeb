"""Cases: gradient norms and clipping over shards, meshes and plain tensors."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp_v2 import clip_grad_norm_, clip_grads_with_norm_, full_tensor, fully_shard, get_total_norm
from tests.functional.core.cases_support import STRATEGIES, Duel, Net, Ranks, case, refused, sgd, shard_net

NORMS = (1.0, 2.0, 2.5, math.inf)


@case(strategies=STRATEGIES)
def clips_as_one_process(ranks: Ranks, strategy: str) -> None:
    for norm_type in NORMS:
        # Adam would make a step of the rounding of gradients that are nearly zero.
        duel = Duel(ranks, Net(), shard_net(strategy), optimizer=sgd)
        for _ in range(3):
            duel.backward()
            ours = clip_grad_norm_(duel.model.parameters(), 0.1, norm_type)
            theirs = torch.nn.utils.clip_grad_norm_(duel.reference.parameters(), 0.1, norm_type)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            duel.step()
        duel.compare_weights()


@case(worlds=(4,))
def norms_over_two_axes(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for outer in ("no_shard", "optim"):
        for norm_type in NORMS:
            duel = Duel(ranks, Net(), shard_net(mesh=mesh, outer_strategy=outer))
            duel.backward()
            ours = get_total_norm([param.grad for param in duel.model.parameters()], norm_type)
            theirs = torch.nn.utils.get_total_norm([param.grad for param in duel.reference.parameters()], norm_type)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@case()
def a_rank_with_nothing_joins(ranks: Ranks) -> None:
    """Field case R29, with an empty shard: one row, so from two ranks on somebody has none."""
    for norm_type in NORMS:
        duel = Duel(ranks, nn.Linear(5, 1, bias=False), fully_shard)
        duel.backward()
        ours = clip_grad_norm_(duel.model.parameters(), 0.01, norm_type)
        theirs = torch.nn.utils.clip_grad_norm_(duel.reference.parameters(), 0.01, norm_type)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        duel.compare_gradients()


class Parts(NamedTuple):
    """Weights of several kinds. On the ranks, ``experts`` holds the rank's own expert alone."""

    dense: nn.Module
    replicated: nn.Module
    experts: list[nn.Module]
    plain: nn.Parameter


def _whole_parts() -> Parts:
    """All weights, with a gradient each, alike on all ranks."""
    experts: list[nn.Module] = [nn.Linear(5, 5, bias=False) for _ in range(2)]
    parts = Parts(nn.Linear(5, 3), nn.Linear(5, 1), experts, nn.Parameter(torch.ones(2)))
    for param in _params(parts):
        param.grad = torch.randn_like(param)
    return parts


def _params(parts: Parts) -> list[nn.Parameter]:
    modules = [parts.dense, parts.replicated, *parts.experts]
    return [*(param for module in modules for param in module.parameters()), parts.plain]


def _sharded(module: nn.Module, **options: Any) -> nn.Module:
    """A sharded copy of the module with the same gradients, got by a backward."""
    copied = fully_shard(copy.deepcopy(module), **options)
    copied.unshard()
    sum((p * q.grad).sum() for p, q in zip(copied.parameters(), module.parameters(), strict=True)).backward()
    copied.finish_grad_sync()
    copied.reshard()
    return copied


def _with_gradient(param: nn.Parameter) -> nn.Parameter:
    """A copy of a plain parameter and its gradient."""
    copied = copy.deepcopy(param)
    copied.grad = copy.deepcopy(param.grad)
    return copied


def _on_the_ranks(whole: Parts, grid: DeviceMesh) -> Parts:
    """The same weights: dense over all four ranks, experts over the two that hold them, some replicated, one plain."""
    mine = whole.experts[grid.get_local_rank("expert")]
    return Parts(
        _sharded(whole.dense),
        _sharded(whole.replicated, strategy="no_shard"),
        [_sharded(mine, mesh=grid["expert_data"])],
        _with_gradient(whole.plain),
    )


@case(worlds=(4,))
def several_meshes_and_a_plain_parameter(ranks: Ranks) -> None:
    """Field case R29: dense weights over 4 ranks, experts over 2 of them, a replicated group and a plain tensor."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "expert_data"))
    for norm_type in NORMS:
        whole = _whole_parts()
        mine = _on_the_ranks(whole, grid)
        expected = torch.nn.utils.clip_grad_norm_(_params(whole), 1.0, norm_type)
        shared = [p.grad for p in [*mine.dense.parameters(), *mine.replicated.parameters(), mine.plain]]
        expert = get_total_norm([p.grad for p in mine.experts[0].parameters()], norm_type)
        # No tensor tells that the other expert-parallel ranks hold other experts, so their norms are combined here.
        every_expert = [torch.empty_like(expert) for _ in range(2)]
        dist.all_gather(every_expert, expert, group=grid.get_group("expert"))
        norm = torch.linalg.vector_norm(torch.stack([get_total_norm(shared, norm_type), *every_expert]), norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
        clip_grads_with_norm_(_params(mine), 1.0, norm)
        own = whole._replace(experts=[whole.experts[grid.get_local_rank("expert")]])
        for ours, theirs in zip(_params(mine), _params(own), strict=True):
            assert ours.grad is not None
            torch.testing.assert_close(full_tensor(ours.grad), theirs.grad, rtol=1e-5, atol=1e-6)


@case(worlds=(4,))
def one_call_for_several_meshes(ranks: Ranks) -> None:
    """One list with gradients over all ranks, over pairs of ranks, over both axes, replicated, and a plain one."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    for norm_type in NORMS:
        whole = _whole_parts()
        expected = torch.nn.utils.clip_grad_norm_(_params(whole), 1.0, norm_type)
        whole = _unclipped(whole, expected)
        mine = Parts(
            _sharded(whole.dense),
            _sharded(whole.replicated, strategy="no_shard"),
            [
                _sharded(whole.experts[0], mesh=grid["shard"]),
                _sharded(whole.experts[1], mesh=grid, outer_strategy="optim"),
            ],
            _with_gradient(whole.plain),
        )
        torch.testing.assert_close(clip_grad_norm_(_params(mine), 1.0, norm_type), expected, rtol=1e-5, atol=1e-6)


def _unclipped(parts: Parts, norm: torch.Tensor) -> Parts:
    """Undo a clipping to 1."""
    for param in _params(parts):
        assert param.grad is not None
        param.grad *= norm + 1e-6
    return parts


@case(worlds=(2,))
def nonfinite_norms_are_reported(ranks: Ranks) -> None:
    model = fully_shard(nn.Linear(4, 4))
    model(torch.full((1, 4), float("inf"))).sum().backward()
    with refused(RuntimeError, "norm of order 2.0"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert not math.isfinite(clip_grad_norm_(model.parameters(), 1.0))
    with refused(ValueError, "norm_type"):
        get_total_norm([torch.ones(2)], 0.0)


@case(worlds=(2,))
def clipped_gradients_keep_their_places(ranks: Ranks) -> None:
    model = fully_shard(nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    before = [param.grad for param in model.parameters()]
    clip_grad_norm_(model.parameters(), 0.5)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))
    norm = sum(float(full_tensor(grad).square().sum()) for grad in before if grad is not None) ** 0.5
    assert abs(norm - 0.5) < 1e-4


@case(worlds=(2,))
def low_precision_gradients_are_scaled_by_an_exact_factor(ranks: Ranks) -> None:
    """A factor rounded to the gradients' dtype would be off by up to 0.4 %, for all of them alike."""
    model = fully_shard(nn.Linear(16, 16, bias=False, dtype=torch.bfloat16))
    model(torch.randn(3, 16, dtype=torch.bfloat16)).square().sum().backward()
    before = full_tensor(model.weight.grad).float()
    norm = clip_grad_norm_(model.parameters(), 0.3)
    torch.testing.assert_close(norm, torch.linalg.vector_norm(before), rtol=1e-5, atol=0)
    expected = (before * (0.3 / (norm + 1e-6))).bfloat16()
    assert torch.equal(full_tensor(model.weight.grad), expected)


@case(worlds=(2,))
def parameters_without_gradients_and_empty_lists_have_norm_zero(ranks: Ranks) -> None:
    model = fully_shard(nn.Linear(4, 4))
    for norm_type in NORMS:
        assert clip_grad_norm_(model.parameters(), 1.0, norm_type).item() == 0
        assert clip_grad_norm_([], 1.0, norm_type).item() == 0
    assert all(param.grad is None for param in model.parameters())
