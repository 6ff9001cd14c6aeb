"""Cases: training as FSDP2 trains, and as plain torch does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fsdp_v2 import full_tensor
from tests.functional.core.cases_support import WIDTH, Block, Net, Ranks, case, sgd, squared
from tests.functional.fsdp2.trio import Trio, as_one, by_layers


@case(usual=(2,))
def one_group(ranks: Ranks) -> None:
    Trio(ranks, Net(), as_one).train()


@case()
def many_groups(ranks: Ranks) -> None:
    Trio(ranks, Net()).train()


class Tree(nn.Module):
    """Units in three levels: eight of them with the root, each with a parameter of its own beside its children's."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.block = Block()
        self.children_ = nn.ModuleList([Tree(depth - 1) for _ in range(2 if depth else 0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(x)
        for child in self.children_:
            x = child(x) * 0.7
        return x


@case(worlds=(2, 3), usual=(2,))
def eight_units_three_deep(ranks: Ranks) -> None:
    def shard(wrap: Callable[..., Any], tree: Any) -> None:
        trees = [module for module in tree.modules() if isinstance(module, Tree)]
        assert len(trees) == 7
        wrap(tree.block)
        for module in reversed(trees[1:]):
            wrap(module)
        wrap(tree)

    Trio(ranks, Tree(2), shard, optimizer=sgd).train(steps=2)


@case(worlds=(2, 4), usual=(4,))
def weights_kept_or_freed_after_forward(ranks: Ranks) -> None:
    values: list[Any] = [True, False, None, *([2] if ranks.world == 4 else [])]
    for value in values:
        Trio(ranks, Net(), partial(by_layers, reshard_after_forward=value)).train(steps=2)


@case(worlds=(4,))
def two_axes(ranks: Ranks) -> None:
    """HSDP on 2 x 2, with and without the all-reduce of every micro-batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    trio = Trio(ranks, Net(), partial(by_layers, mesh=mesh))
    trio.train(steps=2)
    for model in trio.both:
        assert isinstance(model.scale, DTensor)
        assert [type(placement) is Replicate for placement in model.scale.placements] == [True, False]
    for _ in range(2):
        for synchronizes in (False, False, True):
            for model in trio.both:
                model.set_requires_all_reduce(synchronizes)
            trio.backward()
        trio.step()
    trio.compare_weights()


@case(usual=(3,))
def accumulation_without_gradient_sync(ranks: Ranks) -> None:
    trio = Trio(ranks, Net())
    for _ in range(2):
        for synchronizes in (False, False, True):
            for model in trio.both:
                model.set_requires_gradient_sync(synchronizes)
            trio.backward()
            if not synchronizes:
                assert all(param.grad is None for model in trio.both for param in model.parameters())
        trio.step()
    trio.compare_weights()


@case(worlds=(2, 3), usual=(2,))
def names_and_kinds(ranks: Ranks) -> None:
    """Class names, parameter names in order, DTensors cut by rows at rest, plain tensors while gathered."""
    trio = Trio(ranks, Net())
    for ours, theirs in zip(trio.model.modules(), trio.theirs.modules(), strict=True):
        assert type(ours).__name__ == type(theirs).__name__
    assert type(trio.model).__name__ == "FSDPNet"
    assert isinstance(trio.model, Net)
    for name, ours, theirs in trio.pairs():
        for param in (ours, theirs):
            assert isinstance(param, DTensor), name
            assert isinstance(param, nn.Parameter), name
            assert isinstance(param.placements[0], Shard), name
            assert param.placements[0].dim == 0
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype), name
        assert ours.device_mesh == theirs.device_mesh
    seen: list[type] = []
    for model in trio.both:
        hook = model.layers[0].up.register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
        model(torch.randn(2, WIDTH)).sum().backward()
        hook.remove()
    assert seen == [nn.Parameter] * 2
    for name, ours, theirs in trio.pairs():
        assert isinstance(ours.grad, DTensor), name
        assert isinstance(theirs.grad, DTensor), name


class Tied(nn.Module):
    """Blocks between two linear maps that are one, both owned by the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@case(usual=(2,))
def tied_parameters(ranks: Ranks) -> None:
    trio = Trio(ranks, Tied())
    trio.train()
    for model in trio.both:
        assert model.first.weight is model.last.weight


@case(usual=(2,))
def frozen_parameters(ranks: Ranks) -> None:
    """A whole unit, and one parameter of another unit."""
    net = Net()
    for param in [*net.layers[1].parameters(), net.layers[2].up.weight]:
        param.requires_grad_(False)
    trio = Trio(ranks, net)
    trio.train()
    for _, ours, theirs in trio.pairs():
        assert ours.requires_grad == theirs.requires_grad


class Leaving(Net):
    """Leaves one layer out, and a linear map of the root."""

    def __init__(self) -> None:
        super().__init__(3)
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.order = [0, 2]


@case(usual=(3,))
def unused_parameters(ranks: Ranks) -> None:
    """None has a gradient where a unit didn't run at all, as with FSDP2. In a unit that ran they are zeros with ours.

    So an optimizer that moves weights without a gradient, by weight decay say, moves them with ours alone.
    """
    trio = Trio(ranks, Leaving(), optimizer=sgd)
    trio.train()
    trio.backward()
    absent = [{name for name, param in model.named_parameters() if param.grad is None} for model in trio.both]
    spare = {"spare.weight", "spare.bias"}
    assert absent[0] == {name for name, _ in trio.model.named_parameters() if name.startswith("layers.1.")}
    assert absent[1] == absent[0] | spare
    assert not any(full_tensor(trio.model.get_parameter(name).grad).any() for name in spare)


@case(usual=(2,))
def ignored_parameters(ranks: Ranks) -> None:
    """Left plain and unreduced, whoever owns them: the ranks see one batch, so that this keeps them equal."""

    def shard(wrap: Callable[..., Any], net: Any) -> None:
        ignored = {net.scale, net.layers[0].norm.weight}
        by_layers(wrap, net, ignored_params=ignored)

    # Operations on lists of tensors can't take DTensors and plain ones at once.
    one_by_one = partial(torch.optim.AdamW, lr=1e-2, foreach=False)
    trio = Trio(ranks, Net(), shard, optimizer=one_by_one)
    for _ in range(2):
        data = torch.randn(4, WIDTH).expand(ranks.world, 4, WIDTH)
        for loss in [*trio.losses(squared, data), trio.reference_loss(squared, data)]:
            loss.backward()
        trio.step()
    trio.compare_weights()
    for model in trio.both:
        for param in (model.scale, model.layers[0].norm.weight):
            assert type(param) is nn.Parameter


@case(usual=(2,))
def a_module_run_twice(ranks: Ranks) -> None:
    net = Net()
    net.order = [0, 1, 1, 2, 0]
    Trio(ranks, net).train()


@case(worlds=(2, 3), usual=(2,))
def a_child_alone_after_the_root(ranks: Ranks) -> None:
    trio = Trio(ranks, Net(), optimizer=sgd)
    trio.backward()
    trio.step()

    def alone(net: Any, x: torch.Tensor) -> torch.Tensor:
        return squared(net.layers[1], x)

    for _ in range(2):
        trio.backward(alone)
        trio.step()
        trio.backward()
        trio.step()
    trio.compare_weights()


@case(usual=(2,))
def inference_then_training(ranks: Ranks) -> None:
    """Under no_grad from the start, under inference_mode between steps: FSDP2 can't begin with that, ours can."""
    trio = Trio(ranks, Net())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            data = trio.data()
            ours, _ = trio.losses(squared, data)
            torch.testing.assert_close(ours, squared(trio.reference, data[ranks.rank]))
            assert not ours.requires_grad
        trio.train(steps=1)


@case(worlds=(2, 3), usual=(2,))
def losses_stay_alike_for_long(ranks: Ranks) -> None:
    """Twenty steps of one learnable task: the same losses, falling."""
    trio = Trio(ranks, Net(), tolerance=1e-4)
    torch.manual_seed(5)
    data = trio.data()
    history = []
    for _ in range(20):
        losses = trio.losses(squared, data)
        for loss in losses:
            loss.backward()
        for optimizer in trio.optimizers[:2]:
            optimizer.step()
            optimizer.zero_grad()
        history.append([loss.item() for loss in losses])
    assert history[-1][0] < 0.7 * history[0][0]
