"""What the core's cases share: their declaration, small models, and training beside a one-process reference.

This side runs on the ranks; `batches.py` is the pytest side.
"""

from __future__ import annotations

import copy
import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch

# What the first optimizer step imports, for seconds: ranks are forked from a process that has it.
import torch._dynamo
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Replicate

from megatron_fsdp_v2 import FSDPModule, full_tensor, fully_shard
from megatron_fsdp_v2.runtime.unit import Phase
from megatron_fsdp_v2.sharding.dtensor import RowShard

ZERO_3 = "optim_grads_params"
STRATEGIES = (ZERO_3, "optim_grads", "optim", "no_shard")
WIDTH = 5


class Ranks(NamedTuple):
    """This rank and the number of ranks."""

    rank: int
    world: int


@dataclass(frozen=True)
class Case:
    """Numbers of ranks and strategies a case function runs with. No strategies: it isn't told one.

    Without strategies, `usual` are the numbers of ranks that don't belong to the full matrix.
    """

    worlds: tuple[int, ...]
    strategies: tuple[str, ...]
    usual: tuple[int, ...]


def case(
    *, worlds: Iterable[int] = (1, 2, 3, 4), strategies: Iterable[str] = (), usual: Iterable[int] | None = None
) -> Callable[[Any], Any]:
    """Declares `fn(ranks)`, or `fn(ranks, strategy)` when there are strategies, as a case.

    All `worlds` are usual unless told otherwise.
    """

    def declare(fn: Any) -> Any:
        fn.case = Case(tuple(worlds), tuple(strategies), tuple(worlds if usual is None else usual))
        return fn

    return declare


def run_batch(rank: int, world: int, module: str, names: list[str]) -> dict[str, str]:
    """Runs the cases `function` or `function/strategy`; the traceback of each that failed alike on all ranks.

    A failure that other ranks don't share is raised, since they may sit in a collective that can't finish.
    """
    functions = vars(importlib.import_module(module))
    failed: dict[str, str] = {}
    for name in names:
        function, _, strategy = name.partition("/")
        torch.manual_seed(0)
        try:
            functions[function](Ranks(rank, world), *([strategy] if strategy else []))
        except Exception:
            failed[name] = traceback.format_exc()
            print(f"case {name}:\n{failed[name]}", file=sys.stderr, flush=True)
            if not _all_ranks_failed(rank, world, name):
                raise
    return failed


def _all_ranks_failed(rank: int, world: int, name: str) -> bool:
    store = dist.distributed_c10d._get_default_store()
    store.set(f"failed/{name}/{rank}", "yes")
    try:
        store.wait([f"failed/{name}/{other}" for other in range(world)], timedelta(seconds=5))
    except RuntimeError:
        return False
    return True


class Block(nn.Module):
    """A residual block whose parameters have several row sizes."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks below a root that owns a bare parameter and a head. `order` lists the blocks to run."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.order = list(range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return self.head(x * self.scale)


def shard_net(strategy: str = ZERO_3, **options: Any) -> Callable[[nn.Module], None]:
    """A function that makes every block of a Net, and the Net, a unit."""

    def shard(net: Any) -> None:
        for layer in net.layers:
            fully_shard(layer, strategy=strategy, **options)
        fully_shard(net, strategy=strategy, **options)

    return shard


@contextmanager
def refused(kind: type[Exception], *words: str) -> Iterator[None]:
    """Something has to raise `kind` with all `words` in its message."""
    try:
        yield
    except kind as error:
        missing = [word for word in words if word not in str(error)]
        if missing:
            raise AssertionError(f"{missing} not in the message {str(error)!r}") from error
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


def squared(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss that depends on every output."""
    return module(x).square().mean()


def adamw(params: Any) -> torch.optim.Optimizer:
    """Hides the scale of gradients, and moves every weight."""
    return torch.optim.AdamW(params, lr=1e-2, foreach=True)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Shows the scale of gradients, and leaves weights without one alone."""
    return torch.optim.SGD(params, lr=0.1)


class Duel:
    """A sharded model and the same model in plain torch, trained side by side.

    The reference sees what all ranks see: its loss is the mean of their losses.
    """

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        shard: Callable[[Any], Any],
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = adamw,
        inputs: Callable[[], torch.Tensor] | None = None,
        tolerance: float = 1e-5,
    ) -> None:
        self.ranks = ranks
        self.reference = copy.deepcopy(model)
        shard(model)
        self.model: Any = model
        self.optimizer = optimizer(model.parameters())
        self.reference_optimizer = optimizer(self.reference.parameters())
        self.tolerance = tolerance
        self._inputs = inputs or (lambda: torch.randn(ranks.world, 4, WIDTH))

    def data(self) -> torch.Tensor:
        """The next micro-batch of all ranks, (world, ...)."""
        return self._inputs()

    def loss(self, fn: Callable[..., torch.Tensor], data: torch.Tensor) -> torch.Tensor:
        """The sharded model's loss on this rank's part of `data`."""
        return fn(self.model, data[self.ranks.rank])

    def reference_loss(self, fn: Callable[..., torch.Tensor], data: torch.Tensor) -> torch.Tensor:
        """The reference's mean loss over all parts."""
        if fn is squared:
            return squared(self.reference, data.flatten(0, 1))
        return torch.stack([fn(self.reference, part) for part in data]).mean()

    def backward(self, fn: Callable[..., torch.Tensor] = squared) -> None:
        """Forward and backward of one micro-batch on both sides; every unit has to be at rest afterwards."""
        data = self.data()
        self.loss(fn, data).backward()
        self.reference_loss(fn, data).backward()
        assert_at_rest(self.model)

    def step(self) -> None:
        """Compare gradients, step both optimizers and clear the gradients."""
        self.compare_gradients()
        for optimizer in (self.optimizer, self.reference_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, fn: Callable[..., torch.Tensor] = squared, steps: int = 3, micro_batches: int = 3) -> None:
        """Steps of several micro-batches, then compare weights."""
        for _ in range(steps):
            for _ in range(micro_batches):
                self.backward(fn)
            self.step()
        self.compare_weights()

    def compare_gradients(self) -> None:
        """Gradients are equal; where the reference has none, there is none or zeros."""
        for name, param, expected in self._pairs():
            if expected.grad is None:
                assert param.grad is None or not full_tensor(param.grad).any(), f"{name} got a gradient"
                continue
            assert param.grad is not None, f"{name} has no gradient"
            self._compare(f"gradient of {name}", *own_rows(param.grad, expected.grad))

    def compare_weights(self) -> None:
        """Main weights, and what a forward without gradients computes, are equal."""
        for name, param, expected in self._pairs():
            self._compare(name, full_tensor(param), expected)

    def _pairs(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        ours, theirs = dict(self.model.named_parameters()), dict(self.reference.named_parameters())
        assert list(ours) == list(theirs)
        return [(name, ours[name], theirs[name]) for name in ours]

    def _compare(self, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert ours.shape == theirs.shape, f"{what} has shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}"
        if ours.numel():
            worst = (ours.double() - theirs.double()).abs().max().item()
            scale = max(1.0, theirs.double().abs().max().item())
            assert worst <= self.tolerance * scale, f"{what} is off by {worst}"


def own_rows(ours: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of a row-sharded tensor, and the same rows of `whole`; both whole if it's something else."""
    if not isinstance(ours, DTensor) or not all(isinstance(p, (RowShard, Replicate)) for p in ours.placements):
        return full_tensor(ours), whole
    for axis, placement in enumerate(ours.placements):
        if isinstance(placement, RowShard):
            rows = placement.split.range(ours.device_mesh.get_local_rank(axis))
            whole = whole[rows.start : rows.start + rows.count]
    return ours.to_local(), whole


def units_of(root: nn.Module) -> list[Any]:
    """The units of a module and of those below it, itself first."""
    units = [module._fsdp_unit for module in root.modules() if isinstance(module, FSDPModule)]
    return list(dict.fromkeys(units))


def gathered(root: nn.Module) -> list[str]:
    """Names of the units whose transient full weights hold memory."""
    return [unit.name for unit in units_of(root) if any(_holds_full_weights(group) for group in unit.groups)]


def _holds_full_weights(group: Any) -> bool:
    # Before the first forward there are no full weights at all.
    return (
        group.gathers_per_use
        and bool(group.unsharded_params)
        and any(piece.untyped_storage().nbytes() > 0 for piece in group.full.pieces)
    )


def assert_at_rest(root: nn.Module) -> None:
    """Every unit is sharded, its transient memory is freed and its counters are armed again."""
    for name, param in root.named_parameters():
        assert isinstance(param, DTensor), f"{name} shows its full weights"
    assert gathered(root) == []
    for unit in units_of(root):
        assert unit.phase is Phase.IDLE, f"{unit.name} is in {unit.phase}"
        assert not unit.is_bound, f"{unit.name} is bound"
        assert not unit.prefetched, f"{unit.name} is marked as prefetched"
        assert unit.active_backwards == 0, f"{unit.name} counts {unit.active_backwards} backwards"
        for group in unit.groups:
            assert all(param.grad is None for param in group.unsharded_params), f"{unit.name} kept a full gradient"
            if group.gradients is not None and unit.context is not None:
                assert not any(store.is_live for store in group.gradients._sent), f"{unit.name} kept what it sent"
    context = units_of(root)[0].context
    if context is not None:
        assert not context.backward_open
        assert not context.in_root_forward
        assert context._in_flight == []
