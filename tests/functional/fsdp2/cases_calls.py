"""Cases: ways to call sharded modules, each trained as FSDP2 and plain torch train it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.fsdp as fsdp2
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import megatron_fsdp_v2
from megatron_fsdp_v2 import FSDPModule, UnshardHandle, full_tensor, fully_shard
from tests.functional.core.cases_hooks_calls import Wrapping
from tests.functional.core.cases_support import (
    WIDTH,
    Block,
    Net,
    Ranks,
    assert_at_rest,
    case,
    gathered,
    refused,
    sgd,
    squared,
)
from tests.functional.fsdp2.trio import Trio, by_layers


@case(usual=(2,))
def activation_checkpointing(ranks: Ranks) -> None:
    for use_reentrant in (False, True):

        def recomputed(net: Any, x: torch.Tensor, use_reentrant: bool = use_reentrant) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for layer in net.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return x.square().mean()

        trio = Trio(ranks, Net(), optimizer=sgd)
        # The root runs first, so that it is the root.
        trio.train(steps=1)
        trio.train(recomputed, steps=2)


@case(usual=(2,))
def unsharding_by_hand(ranks: Ranks) -> None:
    """Kept through forward and backward until `reshard`, or started early and waited for twice, or by the forward."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    trio.train(steps=1)
    for model, kind in zip(trio.both, (UnshardHandle, fsdp2.UnshardHandle), strict=True):
        assert model.layers[0].unshard() is None
        assert type(model.layers[0].up.weight) is nn.Parameter
        assert isinstance(model.layers[1].up.weight, DTensor), "unshard isn't recursive"
        handle = model.layers[1].unshard(async_op=True)
        assert isinstance(handle, kind)
        handle.wait()
        handle.wait()
        assert type(model.layers[1].up.weight) is nn.Parameter
        model.layers[2].unshard(async_op=True)
    trio.backward()
    for model in trio.both:
        for layer in model.layers:
            layer.unshard()
            layer.reshard()
            layer.reshard()
            assert isinstance(layer.up.weight, DTensor)
    trio.step()
    trio.train(steps=1)
    assert gathered(trio.model) == []


class Separate(nn.Module):
    """An output layer that is called apart from the model, chunk by chunk, in one unit with the norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.in_chunks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.in_chunks:
            return torch.cat([self.head(part) for part in x.chunk(2)])
        return self.head(x)


def in_groups(wrap: Callable[..., Any], model: Any) -> None:
    """Norm and head are one unit, and so are both layers."""
    answer = wrap([model.norm, model.head])
    assert isinstance(answer, list)
    assert answer[0] is model.norm
    wrap(list(model.layers))
    wrap(model)


@case(usual=(2,))
def grouped_modules(ranks: Ranks) -> None:
    """Also with a head that runs several times."""
    for in_chunks in (False, True):
        model = Separate()
        model.in_chunks = in_chunks
        trio = Trio(ranks, model, in_groups)
        for one in trio.both:
            assert type(one.norm).__name__ == "FSDPLayerNorm"
            assert type(one.head).__name__ == "FSDPLinear"
        trio.train()


class Coder(nn.Module):
    """A module used by other methods than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def encode(self, x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        """All but the last layer."""
        return self.layers[0](x) * self.scale * gain

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer."""
        return self.layers[1](x) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


@case(usual=(2,))
def methods_registered_as_forward(ranks: Ranks) -> None:
    def encoded(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model.decode(model.encode(x, gain=0.5)).square().mean()

    trio = Trio(ranks, Coder(), optimizer=sgd)
    for model, module in zip(trio.both, (megatron_fsdp_v2, fsdp2), strict=True):
        module.register_fsdp_forward_method(model, "encode")
        module.register_fsdp_forward_method(model, "decode")
        assert model.encode.__name__ == "encode"
        with refused(ValueError, "no_such"):
            module.register_fsdp_forward_method(model, "no_such")
        plain = Coder()
        module.register_fsdp_forward_method(plain, "encode")
        assert "encode" not in vars(plain)
    trio.train(encoded)
    trio.train(squared, steps=1)


@case(usual=(2,))
def outputs_of_any_kind(ranks: Ranks) -> None:
    """Dicts, dataclasses, tuples and what isn't a tensor; not objects of other kinds, where FSDP2 finds no tensors."""

    def hidden(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x)["hidden"].square().mean()

    model = Wrapping()
    model.layers = model.layers[:-1]
    Trio(ranks, model, optimizer=sgd).train(hidden)


@case(usual=(3,))
def inputs_with_and_without_gradients(ranks: Ranks) -> None:
    """The gradient of an input is that of the plain model; one that needs none gets none."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    for _ in range(2):
        data = trio.data()
        grads = []
        for model in (*trio.both, trio.reference):
            x = data[ranks.rank].clone().requires_grad_()
            model(x).square().sum().backward()
            grads.append(x.grad)
            model.zero_grad()
        torch.testing.assert_close(grads[0], grads[2])
        torch.testing.assert_close(grads[0], grads[1])
        trio.train(steps=1)


@case(usual=(2,))
def two_forwards_before_their_backwards(ranks: Ranks) -> None:
    for order in ((0, 1), (1, 0)):
        trio = Trio(ranks, Net(), optimizer=sgd)
        for _ in range(2):
            batches = [trio.data(), trio.data()]
            losses = [[*trio.losses(squared, data), trio.reference_loss(squared, data)] for data in batches]
            for index in order:
                for loss in losses[index]:
                    loss.backward()
            assert_at_rest(trio.model)
            trio.step()
        trio.compare_weights()


class Shared(nn.Module):
    """Two modules that hold one block, which is a unit."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.layers = nn.ModuleList([nn.Sequential(block), nn.Sequential(block, Block())])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


@case(usual=(2,))
def a_unit_in_two_places(ranks: Ranks) -> None:
    def shard(wrap: Callable[..., Any], model: Any) -> None:
        wrap(model.layers[0][0])
        by_layers(wrap, model)

    Trio(ranks, Shared(), shard, optimizer=sgd).train()


@case(worlds=(2,))
def copies_are_refused(ranks: Ranks) -> None:
    """Deep copies by both; pickling by ours alone, whose file nothing could load."""
    trio = Trio(ranks, Net())
    for model in trio.both:
        for module in (model, model.layers[0]):
            with refused(Exception, "state"):  # type: ignore[arg-type]
                copy.deepcopy(module)
    with refused(RuntimeError, "pickled", "state_dict"):
        pickle.dumps(trio.model)
    trio.train(steps=1)


@case(worlds=(2,))
def parameters_replaced_after_sharding(ranks: Ranks) -> None:
    """Refused by name before they are computed with, and training goes on once they are put back."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    trio.train(steps=1)
    model = trio.model
    state = {name: full_tensor(value) for name, value in model.state_dict().items()}
    with refused(ValueError, "assign=True", "assign=False"):
        model.load_state_dict(state, assign=True)
    with refused(RuntimeError, "can't be moved", "convert the module before"):
        model.to(torch.float64)
    assert model.to("cpu") is model
    kept = model.layers[0].up.weight
    model.layers[0].up.weight = model.layers[1].up.weight
    with refused(RuntimeError, "up.weight", "layers.0", "replaced"):
        model(torch.randn(2, WIDTH))
    model.layers[0].up.weight = kept
    trio.train(steps=1)


@case(worlds=(2,))
def parts_of_containers(ranks: Ranks) -> None:
    """A slice of a sharded container is a plain container, with either."""
    for wrap, kind in ((fully_shard, FSDPModule), (fsdp2.fully_shard, fsdp2.FSDPModule)):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        wrap(model)
        assert isinstance(model, kind)
        assert type(model[:2]) is nn.Sequential
        assert len(model[:2]) == 2
