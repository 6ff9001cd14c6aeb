"""Cases: bad input is refused with a clear error before any collective, and costs nothing."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_fsdp_v2 import FSDPModule, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from tests.functional.core.cases_support import (
    STRATEGIES,
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


def linear() -> nn.Module:
    return nn.Linear(WIDTH, 3)


def assert_refused(make: Callable[[], nn.Module], kind: type[Exception], *words: str, **options: Any) -> None:
    """`fully_shard(make(), **options)` is refused on one rank alone, and the module is what it was."""
    module = make()
    before = fingerprint(module)
    with no_collectives(), refused(kind, *words):
        fully_shard(module, **options)
    assert fingerprint(module) == before
    assert not isinstance(module, FSDPModule)


def fingerprint(module: nn.Module) -> Any:
    """Class, attributes and parameter objects of a module."""
    params = {name: (id(param), param.requires_grad) for name, param in module.named_parameters()}
    return type(module), sorted(vars(module)), params


class no_collectives:
    """Any collective inside is an error, since other ranks may not have come so far."""

    NAMES = ("all_gather", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")

    def __enter__(self) -> None:
        self._originals = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, self._refuse)

    @staticmethod
    def _refuse(*unused: Any, **also_unused: Any) -> None:
        raise AssertionError("a collective was issued")

    def __exit__(self, *unused: Any) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)


@case(worlds=(1, 2))
def strategies(ranks: Ranks) -> None:
    for value in ("zero3", "", None, 3, ["optim"], "OPTIM"):
        assert_refused(linear, ValueError, "strategy=", repr(value), "optim_grads_params", strategy=value)
        assert_refused(linear, ValueError, "outer_strategy=", repr(value), "no_shard", outer_strategy=value)
    assert_refused(linear, ValueError, "outer_strategy='optim'", "2-D mesh", outer_strategy="optim")
    mesh = init_device_mesh("cpu", (ranks.world,))
    assert_refused(linear, ValueError, "outer_strategy='optim'", "2-D mesh", outer_strategy="optim", mesh=mesh)


@case(worlds=(1, 2, 4))
def r46_pairs_of_options(ranks: Ranks) -> None:
    """Each pair of strategies on each kind of mesh trains, or is refused naming both options."""
    rows = 2 if ranks.world == 4 else 1
    flat, grid = init_device_mesh("cpu", (ranks.world,)), init_device_mesh("cpu", (rows, ranks.world // rows))
    for strategy in STRATEGIES:
        for outer in ("no_shard", "optim"):
            options = {"strategy": strategy, "outer_strategy": outer}
            if outer == "optim":
                assert_refused(linear, ValueError, "outer_strategy='optim'", "1-D", mesh=flat, **options)
            else:
                Duel(ranks, Net(), shard_net(mesh=flat, **options)).train(steps=1)
            if (strategy, outer) == ("no_shard", "optim"):
                words = ("outer_strategy='optim'", "strategy='no_shard'")
                assert_refused(linear, ValueError, *words, mesh=grid, **options)
            else:
                Duel(ranks, Net(), shard_net(mesh=grid, **options)).train(steps=1)
    contradiction = {"reduce_dtype": torch.float32, "grad_comm_dtype": torch.bfloat16}
    with refused(ValueError, "reduce_dtype", "grad_comm_dtype"):
        MixedPrecisionPolicy(**contradiction)
    with refused(TypeError, "unexpected keyword argument 'offload_everything'"):
        fully_shard(linear(), offload_everything=True)  # type: ignore[call-arg]


@case(worlds=(1, 2))
def r46_options_without_an_effect(ranks: Ranks) -> None:
    """What can't have an effect says so."""
    for strategy in STRATEGIES:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fully_shard(linear(), strategy=strategy, reshard_after_forward=True)
        texts = [str(w.message) for w in caught if "reshard_after_forward" in str(w.message)]
        assert bool(texts) == (strategy != ZERO_3)
        assert all(repr(strategy) in text for text in texts)


@case(worlds=(1, 2, 3))
def meshes(ranks: Ranks) -> None:
    for value in ("cpu", 3, (1, 2), dist.group.WORLD):
        assert_refused(linear, TypeError, "mesh must be a DeviceMesh", type(value).__name__, mesh=value)
    cube = init_device_mesh("cpu", (1, 1, ranks.world))
    assert_refused(linear, ValueError, "1-D (shard) or 2-D (outer, shard)", "3 dimensions", mesh=cube)
    for device in ("cuda", "xpu", "meta"):
        if device == "cuda" and torch.cuda.is_available():
            continue
        elsewhere = DeviceMesh(device, list(range(ranks.world)), _init_backend=False)
        assert_refused(linear, ValueError, "mesh", repr(device), "'cpu' mesh", mesh=elsewhere)
    if ranks.world > 1:
        backwards = DeviceMesh("cpu", list(range(ranks.world))[::-1])
        assert_refused(linear, ValueError, "ascending order", str(backwards.mesh.tolist()), mesh=backwards)
        others = DeviceMesh("cpu", list(range(ranks.world - 1)))
        if ranks.rank == ranks.world - 1:
            assert_refused(linear, ValueError, f"rank {ranks.rank} isn't part of the mesh", mesh=others)


@case(worlds=(1,))
def no_process_group(ranks: Ranks) -> None:
    dist.destroy_process_group()
    assert_refused(linear, RuntimeError, "init_process_group")
    # The cases after this one share its process.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@case(worlds=(1, 2))
def arguments_of_the_wrong_type(ranks: Ranks) -> None:
    words = "reshard_after_forward must be True, False, None or a number of ranks that divides"
    for value in (0, -1, 5, 1.0, "yes"):
        assert_refused(linear, ValueError, words, repr(value), reshard_after_forward=value)
    for value in (torch.bfloat16, "bf16", {}):
        assert_refused(linear, TypeError, "mp_policy", type(value).__name__, mp_policy=value)
    for value in ("mean", None, True):
        assert_refused(linear, ValueError, "grad_reduction must be 'average' or 'sum'", grad_reduction=value)
    for value in (0, -1.0, float("inf"), float("nan")):
        assert_refused(linear, ValueError, "grad_divisor must be positive and finite", grad_divisor=value)
    for value in ("2", True, None):
        assert_refused(linear, TypeError, "grad_divisor must be a number", grad_divisor=value)
    for value in (linear, "module", None, nn.Linear):
        with refused(TypeError, "module must be a torch.nn.Module"):
            fully_shard(value)  # type: ignore[type-var]
    for value in (3, "weight", ["weight"], [torch.ones(2)], nn.Parameter(torch.ones(2, 2)), [None]):
        assert_refused(linear, TypeError, "ignored_params must", ignored_params=value)
    assert_refused(linear, TypeError, "shard_placement_fn must be a function", shard_placement_fn=Shard(0))


@case(worlds=(1, 2))
def placements_that_cut_columns(ranks: Ranks) -> None:
    for answer in (Shard(1), Replicate(), 0):
        words = ("shard_placement_fn answered", "Linear.weight", "only rows")
        assert_refused(linear, ValueError, *words, shard_placement_fn=lambda param, answer=answer: answer)
    fully_shard(linear(), shard_placement_fn=lambda param: Shard(0) if param.ndim > 1 else None)


@case(worlds=(1, 2))
def modules_that_cannot_be_units(ranks: Ranks) -> None:
    for container in (lambda: nn.ModuleList([linear()]), lambda: nn.ModuleDict({"a": linear()})):
        assert_refused(container, ValueError, "has no forward")
    assert_refused(lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]), ValueError, "has no forward")
    module = linear()
    fully_shard(module)
    with refused(ValueError, "is a unit already"):
        fully_shard(module)
    module(torch.randn(2, WIDTH)).sum().backward()
    root = nn.Sequential(linear())
    fully_shard(root)
    with refused(ValueError, "Linear.weight", "sharded already", "inner modules before outer ones"):
        fully_shard(root[0])
    root(torch.randn(2, WIDTH)).sum().backward()


class Tagged(nn.Linear):
    """Can't be subclassed without a tag."""

    def __init_subclass__(cls, *, tag: str) -> None:
        super().__init_subclass__()


class Guarded(Block):
    """Lets nobody set an attribute once it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.built = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("built"):
            raise AttributeError(f"{name} can't be set")
        super().__setattr__(name, value)


@case(worlds=(1, 2))
def classes_of_their_own_mind(ranks: Ranks) -> None:
    assert_refused(lambda: Tagged(WIDTH, 3), TypeError, "tag")
    Duel(ranks, Guarded(), fully_shard).train(steps=1)


class Odd(nn.Module):
    """Holds one odd parameter beside a good one."""

    def __init__(self, odd: Any) -> None:
        super().__init__()
        self.good = linear()
        self.inner = nn.Module()
        self.inner.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.good(x)


@case(worlds=(1, 2))
def parameters_that_cannot_be_sharded(ranks: Ranks) -> None:
    mesh = init_device_mesh("cpu", (ranks.world,))
    rows = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    copies = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Replicate()]))
    hooked = nn.Parameter(torch.ones(2))
    hooked.register_hook(lambda grad: grad)
    later = nn.Parameter(torch.ones(2))
    later.register_post_accumulate_grad_hook(lambda param: None)
    odd = {
        "scalar": nn.Parameter(torch.tensor(1.0)),
        "a DTensor on the mesh": rows,
        "DTensor": copies,
        "has no shape yet": nn.parameter.UninitializedParameter(),
        "gradient hooks": hooked,
        "hooks, which would never be called": later,
        "complex": nn.Parameter(torch.ones(2, dtype=torch.complex64)),
    }
    for word, param in odd.items():
        assert_refused(lambda param=param: Odd(param), ValueError, "Odd.inner.odd", word)


@case(strategies=STRATEGIES)
def moving_and_casting_after_fully_shard(ranks: Ranks, strategy: str) -> None:
    """Refused naming a unit, from the root, a unit or above; what changes nothing is allowed."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    outside = nn.Sequential(duel.model)
    duel.train(steps=1)
    for module in (duel.model, duel.model.layers[1], outside):
        for move in ("half", "double", "bfloat16"):
            with refused(RuntimeError, "after fully_shard", "unit "):
                getattr(module, move)()
        with refused(RuntimeError, "after fully_shard", "meta"):
            module.to("meta")
    for module in (duel.model, outside):
        module.to("cpu").float().to(torch.float32)
    duel.train()


@case(worlds=(1, 2))
def conversion_reaches_what_is_not_sharded(ranks: Ranks) -> None:
    net = Net()
    net.register_buffer("table", torch.ones(3, dtype=torch.float64))
    ignored = nn.Parameter(torch.ones(2, dtype=torch.float64))
    net.extra = ignored
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net, ignored_params=[ignored])
    net.float()
    assert net.table.dtype is torch.float32
    assert net.extra is ignored
    assert ignored.dtype is torch.float32
    net(torch.randn(2, WIDTH)).sum().backward()


@case(worlds=(1, 2))
def copying_after_fully_shard(ranks: Ranks) -> None:
    net = Net()
    shard_net()(net)
    for module in (net, net.layers[1], nn.Sequential(net)):
        with refused(RuntimeError, "deep-copied", "state_dict"):
            copy.deepcopy(module)
        with refused(RuntimeError, "copied or pickled", "state_dict"):
            pickle.dumps(module)
    net(torch.randn(2, WIDTH)).sum().backward()


@case(worlds=(1, 2))
def arguments_of_methods(ranks: Ranks) -> None:
    duel = Duel(ranks, Net(), shard_net())
    net = duel.model
    setters = ("set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_forward")
    for setter in (*setters, "set_reshard_after_backward"):
        for value in (1, None, "no"):
            with refused(TypeError, setter.removeprefix("set_"), repr(value)):
                getattr(net, setter)(value)
    for value in (0.0, -2, float("inf")):
        with refused(ValueError, "factor must be positive"):
            net.set_gradient_divide_factor(value)
    with refused(TypeError, "factor must be a number"):
        net.set_gradient_divide_factor("2")
    duel.train(steps=1)
    duel.backward()
    for norm_type in (0.0, -1.0):
        with refused(ValueError, "norm_type"):
            clip_grad_norm_(net.parameters(), 1.0, norm_type)
    for value, kind in ((-1.0, ValueError), (float("nan"), ValueError), ("1", TypeError), (None, TypeError)):
        with no_collectives(), refused(kind, "max_norm must be", repr(value)):
            clip_grad_norm_(net.parameters(), value)  # type: ignore[arg-type]
    duel.compare_gradients()
    duel.optimizer.zero_grad()
    duel.reference.zero_grad()
    duel.train()


@case(worlds=(1, 2))
def nothing_was_lost(ranks: Ranks) -> None:
    """A module that was refused in several ways is sharded and trained as if nothing had been."""
    net = Net()
    attempts: list[dict[str, Any]] = [
        {"strategy": "zero"},
        {"outer_strategy": "optim"},
        {"mesh": "cpu"},
        {"mp_policy": torch.bfloat16},
        {"ignored_params": "scale"},
        {"shard_placement_fn": lambda param: Shard(1)},
        {"grad_divisor": 0},
    ]
    for options in attempts:
        with refused(Exception):  # type: ignore[arg-type]
            fully_shard(net, **options)
    Duel(ranks, net, shard_net()).train(squared)
