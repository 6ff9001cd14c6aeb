"""Cases: the setters of a sharded module do what FSDP2's do, and those that can't be honoured say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import share_comm_ctx as torch_share_comm_ctx

from benchmarks.counting import StepCounter
from megatron_fsdp_v2 import full_tensor, fully_shard, share_comm_ctx
from tests.functional.core.cases_support import WIDTH, Net, Ranks, assert_at_rest, case, refused, sgd, squared
from tests.functional.fsdp2.trio import Trio, by_layers, whole


@case(usual=(3,))
def gradient_divide_factor(ranks: Ranks) -> None:
    """The sum of gradients over ranks, divided by the factor; FSDP2 can only sum on this backend."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    for model in trio.both:
        for unit in (model, *model.layers):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(4.0)
    data = trio.data()
    for loss in [*trio.losses(squared, data), trio.reference_loss(squared, data)]:
        loss.backward()
    for (name, ours, theirs), plain in zip(trio.pairs(), trio.reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(full_tensor(ours.grad), plain.grad * ranks.world / 4, msg=name)
        if ranks.world > 1:
            # On a single rank torch 2.13 divides twice.
            torch.testing.assert_close(full_tensor(ours.grad), whole(theirs.grad), msg=name)


@case(usual=(2,))
def sums_in_place_of_averages(ranks: Ranks) -> None:
    trio = Trio(ranks, Net(), optimizer=sgd)
    for model in trio.both:
        for unit in (model, *model.layers):
            unit.set_force_sum_reduction_for_comms(True)
    trio.train(steps=2)


@case(worlds=(4,))
def all_reduce_hook(ranks: Ranks) -> None:
    """On HSDP: called once per unit and backward with the reduced gradients, which it may change."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    trio = Trio(ranks, Net(), partial(by_layers, mesh=mesh), optimizer=sgd)
    calls: list[list[int]] = [[], []]

    def hook(side: int, reduced: torch.Tensor) -> None:
        calls[side].append(reduced.numel())
        reduced.mul_(0.5)

    for side, model in enumerate(trio.both):
        for unit in (model, *model.layers):
            unit.set_all_reduce_hook(partial(hook, side))
    data = trio.data()
    for loss in [*trio.losses(squared, data), trio.reference_loss(squared, data)]:
        loss.backward()
    assert len(calls[1]) == 4
    assert len(calls[0]) >= 4
    for (name, ours, theirs), plain in zip(trio.pairs(), trio.reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(full_tensor(ours.grad), whole(theirs.grad), msg=name)
        torch.testing.assert_close(full_tensor(ours.grad), plain.grad / 2, msg=name)


@case(usual=(2,))
def last_backward(ranks: Ranks) -> None:
    """Micro-batches of which only the last one waits for its reductions."""
    trio = Trio(ranks, Net())
    for _ in range(2):
        for is_last in (False, False, True):
            for model in trio.both:
                model.set_is_last_backward(is_last)
            data = trio.data()
            for loss in [*trio.losses(squared, data), trio.reference_loss(squared, data)]:
                loss.backward()
        assert_at_rest(trio.model)
        trio.step()
    trio.compare_weights()
    # Should the last one not be marked, the optimizer's step waits. FSDP2's would not.
    trio.model.set_is_last_backward(False)
    data = trio.data()
    for loss in [*trio.losses(squared, data), trio.reference_loss(squared, data)]:
        loss.backward()
    for optimizer in trio.optimizers:
        optimizer.step()
    trio.compare_weights()


class Branching(nn.Module):
    """A unit of which each call uses the one or the other branch, or none; what isn't used gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.chosen: int | None = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if self.chosen is None else self.branches[self.chosen](x)


class Branches(nn.Module):
    """Two such units below a root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Branching(), Branching()])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def choose(self, rank: int) -> None:
        """Rank 0 uses the first branch in its first unit and none in its second, all others the second branches."""
        self.layers[0].chosen, self.layers[1].chosen = (0, None) if rank == 0 else (1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


@case(worlds=(2, 3), usual=(2,))
def branches_that_differ_between_ranks(ranks: Ranks) -> None:
    """Units that reduce zeros for what wasn't used on this rank, as it may have been on another."""

    def on_every_rank(model: Any, parts: torch.Tensor) -> torch.Tensor:
        losses = []
        for rank, part in enumerate(parts):
            model.choose(rank)
            losses.append(squared(model, part))
        return torch.stack(losses).mean()

    trio = Trio(ranks, Branches(), optimizer=sgd)
    for model in trio.both:
        model.set_reduce_scatter_unused_params(True)
        model.choose(ranks.rank)
    for _ in range(3):
        data = trio.data()
        losses = [squared(model, data[ranks.rank]) for model in trio.both]
        for loss in [*losses, on_every_rank(trio.reference, data)]:
            loss.backward()
        trio.step()
    trio.compare_weights()


@case(worlds=(2,))
def iteration_state_is_reset_after_an_error(ranks: Ranks) -> None:
    """Gradients that waited for their reduction are lost, as FSDP2 says of its own; it keeps them, though."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    trio.train(steps=1)
    data = trio.data()
    trio.model.set_requires_gradient_sync(False)
    squared(trio.model, data[ranks.rank]).backward()
    trio.model.set_requires_gradient_sync(True)
    for model in trio.both:
        hook = model.layers[1].up.register_forward_pre_hook(_fail)
        with refused(ArithmeticError, "on purpose"):
            squared(model, data[ranks.rank])
        hook.remove()
        model.reset_iter_state()
    assert_at_rest(trio.model)
    trio.train(steps=2)


def _fail(*args: Any) -> None:
    raise ArithmeticError("on purpose")


@case(worlds=(2,))
def roots_share_their_communication(ranks: Ranks) -> None:
    """Two stages of a pipeline, one after the other."""
    trios = [Trio(ranks, Net(), optimizer=sgd), Trio(ranks, Net(), optimizer=sgd)]
    share_comm_ctx([trio.model for trio in trios])
    torch_share_comm_ctx([trio.theirs for trio in trios])
    assert trios[0].model._fsdp_unit.context.streams is trios[1].model._fsdp_unit.context.streams
    for _ in range(2):
        for trio in trios:
            trio.train(steps=1)
    share_comm_ctx([])
    with refused(TypeError, "Linear", "fully_shard"):
        share_comm_ctx([nn.Linear(1, 1)])  # type: ignore[list-item]


@case(worlds=(2,))
def resharding_is_set_at_any_time(ranks: Ranks) -> None:
    """The gathers of an evaluation and of a training step, as with FSDP2."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    trio.train(steps=1)

    def gathers(run: Callable[[Any], Any]) -> list[int]:
        counts = []
        for model in trio.both:
            with StepCounter() as counter:
                run(model)
            counts.append(counter.calls["all-gather"])
        return counts

    x = torch.ones(2, WIDTH)
    assert gathers(lambda model: squared(model, x).backward()) == [7, 7]
    for model in trio.both:
        model.set_reshard_after_forward(True)
    assert gathers(lambda model: squared(model, x).backward()) == [8, 8]
    for model in trio.both:
        model.set_reshard_after_forward(False, recurse=False)
        model.layers[0].set_reshard_after_forward(False)
    assert gathers(lambda model: squared(model, x).backward()) == [6, 6]
    for model in trio.both:
        model.zero_grad()
    trio.train(steps=1)


@case(worlds=(2,))
def what_cannot_be_honoured_names_itself(ranks: Ranks) -> None:
    """And its defaults, which change nothing, are taken."""
    trio = Trio(ranks, Net(), optimizer=sgd)
    model = trio.model
    refusals: list[tuple[str, Any]] = [
        ("set_custom_all_gather", "mine"),
        ("set_custom_reduce_scatter", "mine"),
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_symm_mem_for_comm", "NCCL"),
        ("set_reduce_scatter_max_input_buffers", 2),
        ("set_separate_reduce_scatter_group", True),
    ]
    for name, value in refusals:
        with refused(NotImplementedError, name, repr(value), "can't be honoured"):
            getattr(model, name)(value)
    with refused(ValueError, "stream", "switch inside the hook"):
        model.set_all_reduce_hook(print, stream="a stream")
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_reduce_scatter_max_input_buffers(1)
    model.set_separate_reduce_scatter_group(False)
    model.set_post_optim_event(None)
    trio.train(steps=1)


@case(worlds=(2,))
def gathers_wait_for_an_event_once(ranks: Ranks) -> None:
    """For the event that was set, and for all of compute in the next forward again. Streams show on a GPU only."""
    net: Any = Net()
    by_layers(fully_shard, net)
    net(torch.ones(2, WIDTH))
    event, waited = object(), []
    net._fsdp_unit.context.streams.gather_after_compute = lambda event=None: waited.append(event)
    net.set_post_optim_event(event)
    for expected in (event, None):
        waited.clear()
        net(torch.ones(2, WIDTH))
        assert waited[0] is expected
