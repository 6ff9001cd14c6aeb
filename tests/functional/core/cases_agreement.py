"""Cases: ranks that are about to do different things are told so, with the unit, instead of hanging."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn as nn

from megatron_fsdp_v2 import fully_shard
from megatron_fsdp_v2.runtime import agreement
from tests.functional.core.cases_support import (
    WIDTH,
    ZERO_3,
    Block,
    Duel,
    Net,
    Ranks,
    case,
    refused,
    shard_net,
    squared,
)

WORLDS = (2, 3)


@case(worlds=WORLDS)
def another_branch_in_the_first_forward(ranks: Ranks) -> None:
    duel = Duel(ranks, Net(), shard_net(ZERO_3))
    if ranks.rank == 1:
        duel.model.order = [0, 2]
    with refused(RuntimeError, "ranks disagree", "rank 1: gather unit 'layers.2'", "0", ": gather unit 'layers.1'"):
        duel.loss(squared, duel.data())
    duel.model.order = [0, 1, 2]
    duel.train(steps=1)


@case(worlds=WORLDS)
def a_unit_more_on_one_rank(ranks: Ranks) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in net[: 1 + ranks.rank % 2]:
        fully_shard(layer)
    fully_shard(net)
    with refused(RuntimeError, "ranks disagree", "shard unit"):
        net(torch.ones(2, 4))


@case(worlds=WORLDS)
def parameters_in_another_order(ranks: Ranks) -> None:
    layers = [nn.Linear(4, 3), nn.Linear(3, 4)]
    names = ["a", "b"] if ranks.rank == 0 else ["b", "a"]
    by_name = dict(zip("ab", layers, strict=True))
    module = nn.Sequential()
    for name in names:
        module.add_module(name, by_name[name])
    fully_shard(module)
    with refused(RuntimeError, "ranks disagree", "Sequential", "a.weight (3, 4)", "b.weight (4, 3)"):
        module(torch.ones(2, 4 if ranks.rank == 0 else 3))


class Cut(Net):
    """Passes no gradient on to its first block if told so."""

    cut = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = self.layers[1](x.detach() if self.cut else x)
        return self.head(self.layers[2](x) * self.scale)


@case(worlds=WORLDS)
def a_backward_through_less(ranks: Ranks) -> None:
    duel = Duel(ranks, Cut(), shard_net(ZERO_3))
    duel.model.cut = ranks.rank == 1
    loss = duel.loss(squared, duel.data())
    with refused(RuntimeError, "ranks disagree", "of unit 'layers.1'", "of unit 'Cut'"):
        loss.backward()
    duel.model.cut = False
    duel.train(steps=1)


@case(worlds=WORLDS)
def nothing_is_compared_after_the_first_step(ranks: Ranks) -> None:
    for mode, expected in (("first_step", False), ("always", True), ("never", False)):
        duel = Duel(ranks, Net(), shard_net(ZERO_3))
        duel.model.set_agreement_check(mode)
        with mock.patch.object(agreement.dist, "all_gather", wraps=torch.distributed.all_gather) as compared:
            duel.loss(squared, duel.data()).backward()
        assert bool(compared.call_count) is (mode != "never")
        with mock.patch.object(agreement.dist, "all_gather", wraps=torch.distributed.all_gather) as compared:
            duel.loss(squared, duel.data()).backward()
        assert bool(compared.call_count) is expected


@case(worlds=WORLDS)
def another_branch_later(ranks: Ranks) -> None:
    duel = Duel(ranks, Net(), shard_net(ZERO_3))
    duel.model.set_agreement_check("always")
    duel.train(steps=1)
    if ranks.rank == 0:
        duel.model.order = [1, 0, 2]
    with refused(RuntimeError, "ranks disagree", "layers.1", "layers.0"):
        duel.loss(squared, duel.data())
    with refused(ValueError, "first_step, always, never", "'often'"):
        duel.model.set_agreement_check("often")
    with refused(RuntimeError, "ran already"):
        duel.model.set_agreement_check("never")


@case(worlds=(4,))
def another_branch_across_replicas(ranks: Ranks) -> None:
    """Both axes of a 2-D mesh are compared."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2))
    net = nn.Sequential(Block(), Block())
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    run = net if ranks.rank < 2 else lambda x: net[1](net[0](x))
    with refused(RuntimeError, "ranks disagree"):
        run(torch.ones(2, WIDTH))
