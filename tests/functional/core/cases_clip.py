"""Cases: gradient norms and clipping over shards, meshes and plain tensors."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp_v2 import clip_grad_norm_, full_tensor, fully_shard, get_total_norm
from tests.functional.core.cases_support import STRATEGIES, Duel, Net, Ranks, case, refused, shard_net

NORMS = (1.0, 2.0, 3.0, math.inf)


@case(strategies=STRATEGIES)
def clips_as_one_process(ranks: Ranks, strategy: str) -> None:
    for norm_type in NORMS:
        duel = Duel(ranks, Net(), shard_net(strategy))
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


@case(worlds=(4,))
def several_meshes_and_a_plain_parameter(ranks: Ranks) -> None:
    """Field case R29: dense weights over 4 ranks, experts over 2 of them, a replicated group and a plain tensor."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "expert_data"))
    expert = grid.get_local_rank("expert")
    torch.manual_seed(0)
    dense, plain = nn.Linear(5, 3), nn.Parameter(torch.ones(2))
    experts = [nn.Linear(5, 5, bias=False) for _ in range(2)]
    replicated = nn.Linear(5, 1)
    everything = [*dense.parameters(), *experts[0].parameters(), *experts[1].parameters(), *replicated.parameters()]
    for param in [*everything, plain]:
        param.grad = torch.randn_like(param)
    for norm_type in (2.0, 1.0):
        whole = torch.nn.utils.get_total_norm(
            [param.grad for param in [*everything, plain] if param.grad is not None], norm_type
        )
        parts = [
            _sharded_grads(dense),
            _sharded_grads(experts[expert], mesh=grid["expert_data"]),
            _sharded_grads(replicated, strategy="no_shard"),
        ]
        mine = [grad for part in parts for grad in part] + [plain.grad]
        norm = get_total_norm(mine, norm_type)
        # Only this rank's expert is in its list: the other one's share is missing from the norm, in every part alike.
        other = torch.nn.utils.get_total_norm([param.grad for param in experts[1 - expert].parameters()], norm_type)
        expected = (whole**norm_type - other**norm_type) ** (1 / norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)


def _sharded_grads(module: nn.Module, **options: object) -> list[torch.Tensor]:
    """The module's gradients as a sharded module would hold them."""
    sharded = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)  # type: ignore[arg-type]
    fully_shard(sharded, grad_reduction="average", **options)  # type: ignore[arg-type]
    loss = torch.zeros(())
    sharded.unshard()
    for param, source in zip(sharded.parameters(), module.parameters(), strict=True):
        loss = loss + (param * source.grad).sum()
    loss.backward()
    sharded.finish_grad_sync()
    sharded.reshard()
    return [param.grad for param in sharded.parameters() if param.grad is not None]


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
