"""Cases: torch's own optimizers, schedulers, clipping and gradient scaler, used as with FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

import megatron_fsdp_v2
from tests.functional.core.cases_support import WIDTH, Net, Ranks, case, refused, sgd, squared
from tests.functional.fsdp2.trio import Trio, as_one, whole

Make = Callable[..., torch.optim.Optimizer]

WORKING: dict[str, Make] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "Adam amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "SGD momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "SGD momentum foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
}
# What torch's operations on sharded tensors lack may come with another release.
AS_FSDP2: dict[str, Make] = {
    "SGD fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2, foreach=False),
    "Adafactor foreach": partial(torch.optim.Adafactor, lr=1e-2, foreach=True),
}


@case(usual=(3,))
def optimizers_of_torch(ranks: Ranks) -> None:
    for make in WORKING.values():
        # One step of Adam takes the sign of what is nearly zero.
        Trio(ranks, Net(), as_one, optimizer=make, tolerance=1e-4).train(steps=3, micro_batches=1)


@case(worlds=(2,))
def optimizers_that_torch_may_not_shard(ranks: Ranks) -> None:
    """They work where they work with FSDP2, and say the same where they don't.

    Two ranks alone: on three, with our cuts, Adafactor(foreach=True) fails on some ranks only and the others wait.
    """
    for name, make in AS_FSDP2.items():
        trio = Trio(ranks, Net(), as_one, optimizer=make)
        trio.backward()
        outcomes = []
        for optimizer in trio.optimizers[:2]:
            try:
                optimizer.step()
                outcomes.append("")
            except (NotImplementedError, RuntimeError) as error:
                outcomes.append(str(error).split("placement")[0].split("Operator")[-1])
        assert outcomes[0] == outcomes[1], (name, outcomes)


@case(usual=(2,))
def schedulers_and_groups_of_parameters(ranks: Ranks) -> None:
    """Matrices decay and vectors don't, on a schedule with warm-up."""

    def make(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        groups = [
            {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
            {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=3e-2)

    trio = Trio(ranks, Net(), optimizer=make)
    schedulers = [
        torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
            ],
            [2],
        )
        for optimizer in trio.optimizers
    ]
    for _ in range(5):
        trio.backward()
        trio.step()
        for scheduler in schedulers:
            scheduler.step()
    trio.compare_weights()
    rates = [scheduler.get_last_lr() for scheduler in schedulers]
    assert rates[0] == rates[1] == rates[2]


@case(usual=(2, 4))
def clipping_with_torch(ranks: Ranks) -> None:
    """Norms of any finite order, of parts of the model too. At four ranks the head's three rows leave one rank none."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    for norm_type in (2.0, 1.0, 3.0):
        trio.backward()
        models = (*trio.both, trio.reference)
        totals = [whole(get_total_norm([param.grad for param in model.parameters()], norm_type)) for model in models]
        norms = [whole(clip_grad_norm_(model.parameters(), 0.01, norm_type)) for model in models]
        for measured in (totals, norms):
            torch.testing.assert_close(measured[0], measured[2])
            torch.testing.assert_close(measured[0], measured[1])
        trio.step()
    trio.compare_weights()


@case(usual=(4,))
def clipping_with_ours(ranks: Ranks) -> None:
    """Of FSDP2's model too; and the largest element, which torch can't take of a shard without elements."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    for norm_type in (2.0, math.inf):
        trio.backward()
        norms = [
            megatron_fsdp_v2.clip_grad_norm_(trio.model.parameters(), 0.01, norm_type),
            megatron_fsdp_v2.clip_grad_norm_(trio.theirs.parameters(), 0.01, norm_type),
            clip_grad_norm_(trio.reference.parameters(), 0.01, norm_type),
        ]
        assert not any(isinstance(norm, DTensor) for norm in norms)
        torch.testing.assert_close(norms[0], norms[2])
        torch.testing.assert_close(norms[0], norms[1])
        trio.step()
    trio.compare_weights()
    with refused(RuntimeError, "empty"):
        torch.linalg.vector_norm(torch.empty(0, WIDTH), math.inf)


@case(usual=(2,))
def optimizer_steps_in_backward(ranks: Ranks) -> None:
    """One optimizer per parameter, stepped by a hook as soon as the gradient is reduced."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    stepped: list[list[str]] = [[], [], []]
    for names, model in zip(stepped, (*trio.both, trio.reference), strict=True):
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(partial(_step_one, names, name, sgd([param])))
    for _ in range(3):
        trio.backward()
        assert all(param.grad is None for model in trio.both for param in model.parameters())
        trio.compare_weights()
    for names in stepped:
        assert sorted(names) == sorted(stepped[2])


def _step_one(names: list[str], name: str, optimizer: torch.optim.Optimizer, param: torch.Tensor) -> None:
    names.append(name)
    optimizer.step()
    optimizer.zero_grad()


@case(usual=(2,))
def gradient_scaler(ranks: Ranks) -> None:
    """An overflow that only one rank sees makes all of them skip the step and halve the scale."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) for _ in range(3)]
    for step in range(5):
        data = trio.data()
        losses = [*trio.losses(squared, data), trio.reference_loss(squared, data)]
        for scaler, loss in zip(scalers, losses, strict=True):
            scaler.scale(loss).backward()
        if step == 2:
            for model in (*trio.both, trio.reference):
                _overflow(model, ranks.rank)
        for scaler, optimizer in zip(scalers, trio.optimizers, strict=True):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales = [scaler.get_scale() for scaler in scalers]
        assert scales[0] == scales[1] == scales[2] == (2.0**8, 2.0**9, 2.0**8, 2.0**8, 2.0**9)[step], (step, scales)
        trio.compare_weights()


def _overflow(model: nn.Module, rank: int) -> None:
    """An infinite element in the first row of a weight's gradient, which rank 0 holds."""
    grad = model.get_parameter("layers.1.up.weight").grad
    assert grad is not None
    if not isinstance(grad, DTensor):
        grad[0, 0] = math.inf
    elif rank == 0:
        grad.to_local()[0, 0] = math.inf
