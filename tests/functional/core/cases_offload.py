"""Cases: main weights and gradients that rest in CPU memory of their own."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy as TheirPolicy
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, clip_grad_norm_, fully_shard
from tests.functional.core.cases_support import (
    STRATEGIES,
    ZERO_3,
    Duel,
    Net,
    Ranks,
    case,
    refused,
    shard_net,
    squared,
    units_of,
)


@case(strategies=STRATEGIES)
def trains_as_without(ranks: Ranks, strategy: str) -> None:
    """Bit for bit, with clipping, accumulation and gradients whose reduction is put off."""
    policies = (None, CPUOffloadPolicy(), TheirPolicy(pin_memory=False))
    weights = []
    for policy in policies:
        torch.manual_seed(0)
        duel = Duel(ranks, Net(), shard_net(strategy, offload_policy=policy))
        for _ in range(3):
            with duel.model.no_sync():
                duel.loss(squared, duel.data()).backward()
            for _ in range(2):
                duel.loss(squared, duel.data()).backward()
            clip_grad_norm_(duel.model.parameters(), 0.1)
            duel.optimizer.step()
            duel.optimizer.zero_grad()
        weights.append([param.to_local().clone() for param in duel.model.parameters()])
    for plain, *offloaded in zip(*weights, strict=True):
        for other in offloaded:
            assert plain.equal(other)


@case(strategies=STRATEGIES)
def equals_the_reference(ranks: Ranks, strategy: str) -> None:
    Duel(ranks, Net(), shard_net(strategy, offload_policy=CPUOffloadPolicy())).train()


@case(strategies=STRATEGIES)
def in_low_precision(ranks: Ranks, strategy: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, main_grads_dtype=torch.float64)
    Duel(ranks, Net(), shard_net(strategy, offload_policy=CPUOffloadPolicy(), mp_policy=policy)).train(steps=2)


@case(strategies=(ZERO_3, "optim"))
def weights_are_copied_for_use_and_freed(ranks: Ranks, strategy: str) -> None:
    """The copy that is computed with is other memory, which ZeRO-3 gives back between uses."""
    duel = Duel(ranks, Net(), shard_net(strategy, offload_policy=CPUOffloadPolicy()))
    duel.train(steps=1)
    for group in [group for unit in units_of(duel.model) for group in unit.groups]:
        main, compute = (pieces[0].untyped_storage() for pieces in (group.main.pieces, group.compute.pieces))
        assert main.data_ptr() != compute.data_ptr()
        assert (compute.nbytes() == 0) is (strategy == ZERO_3)
        assert main.nbytes() > 0
    for param in duel.model.parameters():
        assert isinstance(param, DTensor)
        assert param.to_local().device.type == "cpu"


@case(worlds=(1, 2))
def policies_of_another_kind(ranks: Ranks) -> None:
    with refused(TypeError, "offload_policy must be an OffloadPolicy, got bool"):
        fully_shard(torch.nn.Linear(2, 2), offload_policy=True)  # type: ignore[arg-type]
    fully_shard(torch.nn.Linear(2, 2), offload_policy=OffloadPolicy())
