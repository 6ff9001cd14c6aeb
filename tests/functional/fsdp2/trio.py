"""A model under our `fully_shard`, the same under FSDP2's, and the same in plain torch, trained side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import full_tensor, fully_shard
from tests.functional.core.cases_support import Duel, Ranks, adamw, assert_at_rest, squared

# What shards a model, told which `fully_shard` to call: ours or FSDP2's.
ShardWith = Callable[[Callable[..., Any], Any], Any]


def by_layers(wrap: Callable[..., Any], net: Any, **options: Any) -> None:
    """Every layer of a Net is a unit, and so is the Net."""
    for layer in net.layers:
        wrap(layer, **options)
    wrap(net, **options)


def as_one(wrap: Callable[..., Any], net: Any, **options: Any) -> None:
    """The whole model is one unit."""
    wrap(net, **options)


class Trio(Duel):
    """A duel with a third model, `theirs`, which FSDP2 shards; both have to agree with the plain reference."""

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        shard: ShardWith = by_layers,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = adamw,
        inputs: Callable[[], torch.Tensor] | None = None,
        tolerance: float = 1e-5,
    ) -> None:
        theirs = copy.deepcopy(model)
        shard(torch_fully_shard, theirs)
        self.theirs: Any = theirs
        self.their_optimizer = optimizer(theirs.parameters())
        super().__init__(
            ranks, model, partial(shard, fully_shard), optimizer=optimizer, inputs=inputs, tolerance=tolerance
        )

    @property
    def both(self) -> tuple[Any, Any]:
        """Our model and FSDP2's."""
        return self.model, self.theirs

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Of our model, FSDP2's and the reference."""
        return self.optimizer, self.their_optimizer, self.reference_optimizer

    def losses(self, fn: Callable[..., torch.Tensor], data: torch.Tensor) -> list[torch.Tensor]:
        """Our loss and FSDP2's on this rank's part of `data`, which have to agree."""
        ours, theirs = [fn(model, data[self.ranks.rank]) for model in self.both]
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=self.tolerance, atol=self.tolerance)
        return [ours, theirs]

    def backward(self, fn: Callable[..., torch.Tensor] = squared) -> None:
        """Forward and backward of one micro-batch of all three; our units have to be at rest afterwards."""
        data = self.data()
        for loss in [*self.losses(fn, data), self.reference_loss(fn, data)]:
            loss.backward()
        assert_at_rest(self.model)

    def step(self) -> None:
        """Compare gradients, step all optimizers and clear the gradients."""
        self.compare_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def compare_gradients(self) -> None:
        """Ours with the reference, and FSDP2's with ours where both have one."""
        super().compare_gradients()
        for name, ours, theirs in self.pairs():
            if ours.grad is not None and theirs.grad is not None:
                self._compare(f"gradient of {name}", full_tensor(ours.grad), whole(theirs.grad))

    def compare_weights(self) -> None:
        """Ours with the reference, and with FSDP2's."""
        super().compare_weights()
        for name, ours, theirs in self.pairs():
            self._compare(name, full_tensor(ours), whole(theirs))

    def pairs(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Parameters of our model and FSDP2's, of one name and in one order."""
        ours, theirs = list(self.model.named_parameters()), list(self.theirs.named_parameters())
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        return [(name, param, other) for (name, param), (_, other) in zip(ours, theirs, strict=True)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of FSDP2's model."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
