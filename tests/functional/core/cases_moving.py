"""Cases: weights, gradients and optimizer state that move to CPU memory between steps, and come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, full_tensor, get_total_norm
from megatron_fsdp_v2.memory.host_copies import ALL_KINDS
from tests.functional.core.cases_support import (
    STRATEGIES,
    ZERO_3,
    Duel,
    Net,
    Ranks,
    adamw,
    assert_at_rest,
    case,
    gathered,
    refused,
    sgd,
    shard_net,
    squared,
    units_of,
)

LOW_PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_grads_dtype=torch.float64)
POLICIES = (MixedPrecisionPolicy(), LOW_PRECISION)
NOT_LOADED = "are in CPU memory; call reload_to_gpu()"


def storages(duel: Duel) -> dict[str, list[torch.UntypedStorage]]:
    """Memory that a rank holds between steps, found without asking what moves it, by kind."""
    stores = [store for unit in units_of(duel.model) for group in unit.groups for store in stores_of(group.gradients)]
    groups = [group for unit in units_of(duel.model) for group in unit.groups]
    params = list(duel.model.parameters())
    states = [value for state in duel.optimizer.state.values() for value in state.values()]
    return {
        "compute_weights": _storages([group.compute.pieces[0] for group in groups if group.unsharded_params]),
        "main_weights": _storages(params),
        "main_gradients": _storages([store.buffer.pieces[0] for store in stores if store.is_live]),
        "optimizer_state": _storages([value for value in states if isinstance(value, torch.Tensor)]),
    }


def stores_of(gradients: Any) -> list[Any]:
    """Buffers of a group's gradients that may have memory between passes."""
    if gradients._main is None:
        return []
    shown = [] if gradients.main._shown is None else [gradients.main._shown]
    return [gradients.main._store, *shown, *gradients._pending]


def _storages(tensors: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    locals_ = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in locals_}.values())


def device_bytes(duel: Duel, *kinds: str) -> int:
    found = storages(duel)
    unique = {storage._cdata: storage for kind in kinds or found for storage in found[kind]}
    return sum(storage.nbytes() for storage in unique.values())


def identities(duel: Duel) -> list[Any]:
    """Everything that has to stay the same object."""
    objects: list[Any] = []
    for param in duel.model.parameters():
        objects += [id(param), id(param._local_tensor), id(duel.optimizer.state.get(param))]
        objects += [id(value) for value in duel.optimizer.state.get(param, {}).values()]
    for unit in units_of(duel.model):
        for group in unit.groups:
            objects += [id(piece) for piece in (*group.main.pieces, *group.compute.pieces, *group.aliases)]
            objects += [*map(id, group.unsharded_params), group.main_version(), group.gathered_version()]
    return objects


def trained(ranks: Ranks, strategy: str, between: Callable[[Duel, int], None], **options: Any) -> list[Any]:
    """Losses, weights and optimizer state of three steps, with `between` called after each."""
    torch.manual_seed(0)
    duel = Duel(ranks, Net(), shard_net(strategy, **options))
    result: list[Any] = []
    for step in range(3):
        loss = duel.loss(squared, duel.data())
        loss.backward()
        clip_grad_norm_(duel.model.parameters(), 0.1)
        duel.optimizer.step()
        duel.model.zero_grad()
        result.append(loss.detach())
        between(duel, step)
    duel.model.reload_to_gpu()
    result += [param.to_local().detach() for param in duel.model.parameters()]
    for state in duel.optimizer.state.values():
        result += [value.to_local() if isinstance(value, DTensor) else value for value in state.values()]
    return result


def assert_same(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert len(ours) == len(plain)
    assert all(mine.equal(theirs) for mine, theirs in zip(ours, plain, strict=True))


@case(worlds=(1, 2, 3, 4), strategies=STRATEGIES)
def phases_train_as_without(ranks: Ranks, strategy: str) -> None:
    """As reinforcement-learning trainers do it: all memory is free while something else runs; then bit for bit on."""

    def away_and_back(duel: Duel, step: int) -> None:
        before = device_bytes(duel)
        report = duel.model.offload_to_cpu()
        assert device_bytes(duel) == 0
        assert report.offloaded_bytes == before == sum(report.per_kind.values())
        assert report.skipped_bytes == 0
        duel.model.release_memory_pool()
        duel.model.reload_to_gpu()
        assert device_bytes(duel) == before

    def lazily_back(duel: Duel, step: int) -> None:
        duel.model.offload_to_cpu()
        assert device_bytes(duel) == 0

    def in_part(duel: Duel, step: int) -> None:
        duel.model.offload_to_cpu(max_cpu_bytes=device_bytes(duel) // (step + 2))

    for policy in POLICIES:
        plain = trained(ranks, strategy, lambda duel, step: None, mp_policy=policy)
        for between in (away_and_back, lazily_back, in_part):
            assert_same(trained(ranks, strategy, between, mp_policy=policy), plain)
    kept = (CPUOffloadPolicy(), lambda duel, step: duel.model.offload_to_cpu())
    assert_same(
        trained(ranks, strategy, kept[1], offload_policy=kept[0]),
        trained(ranks, strategy, lambda duel, step: None, offload_policy=kept[0]),
    )


@case(worlds=(1, 2, 3), strategies=STRATEGIES)
def each_kind_moves_alone(ranks: Ranks, strategy: str) -> None:
    """And comes back with what needs it: optimizer state not before the optimizer steps."""
    for policy in POLICIES:
        shared = policy is not LOW_PRECISION
        for kind in ALL_KINDS:
            duel = Duel(ranks, Net(), shard_net(strategy, mp_policy=policy))
            duel.backward()
            duel.optimizer.step()
            before = {other: device_bytes(duel, other) for other in ALL_KINDS}
            report = duel.model.offload_to_cpu(kinds=[kind])
            moves_nothing = shared and kind == "main_weights"
            assert device_bytes(duel, kind) == (before[kind] if moves_nothing else 0)
            assert report.per_kind == {
                other: 0 if moves_nothing or other != kind else before[kind] for other in ALL_KINDS
            }
            for other in ALL_KINDS:
                if other != kind and not (shared and {kind, other} == {"compute_weights", "main_weights"}):
                    assert device_bytes(duel, other) == before[other], (kind, other)
            duel.backward()
            if kind == "optimizer_state":
                assert device_bytes(duel, kind) == 0, "no pass needs it"
            duel.optimizer.step()
            assert device_bytes(duel, kind) == before[kind]


@case(worlds=(1, 2, 3), strategies=STRATEGIES)
def objects_stay_what_they_are(ranks: Ranks, strategy: str) -> None:
    for policy in POLICIES:
        duel = Duel(ranks, Net(), shard_net(strategy, mp_policy=policy))
        duel.backward()
        duel.optimizer.step()
        before = identities(duel)
        grads = [(id(param.grad), id(param.grad._local_tensor)) for param in duel.model.parameters()]
        values = [full_tensor(param.grad).clone() for param in duel.model.parameters()]
        for _ in range(2):
            duel.model.offload_to_cpu()
            assert identities(duel) == before
        for _ in range(2):
            duel.model.reload_to_gpu()
            assert identities(duel) == before
        assert [(id(param.grad), id(param.grad._local_tensor)) for param in duel.model.parameters()] == grads
        for param, value in zip(duel.model.parameters(), values, strict=True):
            assert full_tensor(param.grad).equal(value)
        # Nothing was left behind that would make the next step build its gradients anew.
        del values
        duel.model.zero_grad()
        duel.backward()
        assert [(id(param.grad), id(param.grad._local_tensor)) for param in duel.model.parameters()] == grads


@case(worlds=(1, 2), strategies=STRATEGIES)
def a_budget_takes_the_largest_first(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy, mp_policy=LOW_PRECISION))
    duel.backward()
    duel.optimizer.step()
    found = {storage._cdata: storage for of_kind in storages(duel).values() for storage in of_kind}
    sizes = sorted([storage.nbytes() for storage in found.values() if storage.nbytes()], reverse=True)
    total = sum(sizes)
    assert duel.model.offload_to_cpu(max_cpu_bytes=0).skipped_bytes == total
    for budget in (sizes[0], sizes[0] + sizes[1], total // 2, total - 1):
        room, expected = budget, []
        for size in sizes:
            if size <= room:
                room -= size
                expected.append(size)
        report = duel.model.offload_to_cpu(max_cpu_bytes=budget)
        assert sorted(_moved(duel), reverse=True) == expected
        assert report.offloaded_bytes == sum(expected) <= budget
        assert report.skipped_bytes == total - sum(expected) == device_bytes(duel)
        assert duel.model.offload_to_cpu(max_cpu_bytes=budget) == report, "what is away counts in the budget"
        duel.model.reload_to_gpu()
    assert duel.model.offload_to_cpu(max_cpu_bytes=total).skipped_bytes == 0


def _moved(duel: Duel) -> list[int]:
    copies = [copy for unit in units_of(duel.model) for copy in unit.host_copies._copies]
    return [copy.contents.nbytes for copy in copies]


@case(worlds=(2,))
def a_part_of_a_model(ranks: Ranks) -> None:
    duel = Duel(ranks, Net(), shard_net(ZERO_3))
    duel.train(steps=1)
    part = duel.model.layers[1]
    report = part.offload_to_cpu()
    assert report.offloaded_bytes == sum(_moved(duel)) > 0
    assert not part.up.weight._local_tensor.untyped_storage().nbytes()
    assert duel.model.layers[0].up.weight._local_tensor.untyped_storage().nbytes()
    duel.model.offload_to_cpu()
    part.reload_to_gpu()
    assert part.up.weight._local_tensor.untyped_storage().nbytes()
    assert not duel.model.scale._local_tensor.untyped_storage().nbytes()
    duel.train(steps=2)


@case(worlds=(2,), strategies=STRATEGIES)
def every_entry_brings_back_what_it_needs(ranks: Ranks, strategy: str) -> None:
    """All that reads or writes data beside a reference that never moved."""
    entries: dict[str, Callable[[Duel, nn.Module], Any]] = {
        "forward": lambda duel, model: model(torch.ones(2, 5)),
        "evaluation": lambda duel, model: evaluated(model),
        "unshard": unsharded,
        "step": lambda duel, model: optimizer_of(duel, model).step(),
        "finish": lambda duel, model: model.finish_grad_sync() if model is duel.model else None,
        "clip": lambda duel, model: clip_grad_norm_(model.parameters(), 0.01),
        "norm": lambda duel, model: get_total_norm([param.grad for param in model.parameters()]),
        "scale": scaled,
        "zero": lambda duel, model: model.zero_grad(),
        "zeros": lambda duel, model: model.zero_grad(set_to_none=False),
        "state_dict": lambda duel, model: [full_tensor(value).clone() for value in model.state_dict().values()],
        "load": loaded,
        "optimizer_state": optimizer_state,
        "full_tensor": lambda duel, model: [full_tensor(param).clone() for param in model.parameters()],
        "torchs_full_tensor": lambda duel, model: [whole(param) for param in model.parameters()],
        "reset": lambda duel, model: model.reset_iter_state() if model is duel.model else None,
    }
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(main_grads_dtype=torch.float64)):
        duel = Duel(ranks, Net(), shard_net(strategy, mp_policy=policy), optimizer=adamw)
        for name, entry in entries.items():
            duel.backward()
            duel.model.offload_to_cpu(optimizer=duel.optimizer)
            assert device_bytes(duel) == 0, name
            entry(duel, duel.model)
            entry(duel, duel.reference)
            duel.model.reset_iter_state()
            if name not in ("zero",):
                duel.compare_gradients()
            duel.compare_weights()
            duel.step()
        duel.compare_weights()


def optimizer_of(duel: Duel, model: nn.Module) -> torch.optim.Optimizer:
    return duel.optimizer if model is duel.model else duel.reference_optimizer


def evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 5))


def unsharded(duel: Duel, model: Any) -> None:
    if model is duel.model:
        model.unshard()
        assert model.head.weight.equal(duel.reference.head.weight) or duel.tolerance
        model.reshard()


def scaled(duel: Duel, model: Any) -> None:
    if model is duel.model:
        model.scale_gradients(0.5)
    else:
        for param in model.parameters():
            param.grad.mul_(0.5)


def loaded(duel: Duel, model: Any) -> None:
    with torch.no_grad():
        model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def whole(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


def optimizer_state(duel: Duel, model: nn.Module) -> None:
    optimizer = optimizer_of(duel, model)
    optimizer.load_state_dict(optimizer.state_dict())
    if model is duel.model:
        duel.model.offload_to_cpu()
        optimizer.load_state_dict(optimizer.state_dict())


@case(worlds=(2,), strategies=(ZERO_3, "optim"))
def other_access_is_refused(ranks: Ranks, strategy: str) -> None:
    """By torch itself, with the kind, the unit and the remedy."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.backward()
    duel.optimizer.step()
    duel.model.offload_to_cpu()
    param = duel.model.layers[1].up.weight
    moment = duel.optimizer.state[param]["exp_avg"]
    for read in (
        lambda: param.to_local().sum(),
        lambda: param.detach().mul_(2),
        lambda: param.grad.to_local() + 1,
        lambda: moment.to_local().clone(),
        lambda: torch.nn.utils.clip_grad_norm_([param], 1.0),
    ):
        with refused(RuntimeError, NOT_LOADED, "unit 'layers.1'"):
            read()
    with refused(RuntimeError, "main gradients of unit 'layers.1'"):
        param.grad.to_local().sum()
    duel.model.reload_to_gpu()
    assert param.to_local().sum().isfinite()


@case(worlds=(1, 2), strategies=STRATEGIES)
def refused_within_a_pass(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.train(steps=1)
    model = duel.model

    def try_both(*words: str) -> None:
        for method in (model.offload_to_cpu, model.release_memory_pool, model.layers[0].offload_to_cpu):
            with refused(RuntimeError, *words):
                method()

    seen: list[str] = []

    def in_forward(module: nn.Module, args: Any) -> None:
        try_both("is in its forward; move memory between steps")
        seen.append("forward")

    def in_backward(grad: torch.Tensor) -> None:
        try_both("a backward through unit", "runs; move memory between steps")
        seen.append("backward")

    with model.layers[1].norm.register_forward_pre_hook(in_forward):
        data = duel.data()[ranks.rank].requires_grad_()
        data.register_hook(in_backward)
        loss = squared(model, data)
    try_both("shows its full weights", "run the backward or call reshard()")
    model.set_is_last_backward(False)
    loss.backward()
    assert seen == ["forward", "backward"]
    try_both("gradients below unit 'Net' are being reduced; call finish_grad_sync()")
    model.set_is_last_backward(True)
    model.finish_grad_sync()
    model.layers[2].unshard()
    try_both("unit 'layers.2' shows its full weights", "call reshard() on it")
    model.layers[2].reshard()
    model.offload_to_cpu()
    assert device_bytes(duel) == 0
    model.release_memory_pool()
    model.zero_grad()
    duel.train(steps=1)
    assert_at_rest(model)


@case(worlds=(2,), strategies=STRATEGIES)
def after_a_pass_that_raised(ranks: Ranks, strategy: str) -> None:
    """A failed pass leaves nothing that would be in the way, and what was moved before it comes back."""
    duel = Duel(ranks, Net(), shard_net(strategy))
    duel.train(steps=1)
    duel.model.offload_to_cpu()

    def fail(*args: Any) -> None:
        raise ValueError("on purpose")

    for register in (duel.model.layers[1].norm.register_forward_pre_hook, _fail_in_backward(duel)):
        with register(fail), refused(ValueError, "on purpose"):
            duel.loss(squared, duel.data()).backward()
        duel.model.offload_to_cpu()
        assert device_bytes(duel) == 0
    duel.model.zero_grad()
    duel.train(steps=2)


def _fail_in_backward(duel: Duel) -> Callable[[Any], Any]:
    def register(fail: Any) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(fail)

        return duel.model.layers[1].norm.register_forward_hook(hook)

    return register


@case(worlds=(2,), strategies=STRATEGIES)
def gradients_that_wait(ranks: Ranks, strategy: str) -> None:
    """Gradients whose reduction is put off move with the others."""
    duel = Duel(ranks, Net(), shard_net(strategy), optimizer=sgd)
    duel.train(steps=1)
    for marked in (True, False):
        duel.model.set_requires_gradient_sync(marked)
        with duel.model.no_sync():
            duel.backward()
        groups = [group for unit in units_of(duel.model) for group in unit.groups]
        assert any(group.gradients.has_pending for group in groups) or (marked and strategy in (ZERO_3, "optim_grads"))
        before = device_bytes(duel, "main_gradients")
        assert duel.model.offload_to_cpu(kinds=["main_gradients"]).offloaded_bytes == before > 0
        assert device_bytes(duel, "main_gradients") == 0
        duel.model.set_requires_gradient_sync(True)
        duel.backward()
        duel.model.finish_grad_sync()
        duel.compare_gradients()
        duel.step()
    duel.compare_weights()


@case(worlds=(2,), strategies=STRATEGIES)
def before_the_first_forward(ranks: Ranks, strategy: str) -> None:
    duel = Duel(ranks, Net(), shard_net(strategy))
    report = duel.model.offload_to_cpu()
    assert report.offloaded_bytes > 0
    assert device_bytes(duel) == 0
    duel.train(steps=2)
    duel.compare_weights()


@case(worlds=(2,))
def weights_kept_gathered_are_freed(ranks: Ranks) -> None:
    duel = Duel(ranks, Net(), shard_net(ZERO_3))
    duel.model.set_reshard_after_forward(False)
    for free in (duel.model.release_memory_pool, duel.model.offload_to_cpu):
        evaluated(duel.model)
        assert gathered(duel.model)
        free()
        assert gathered(duel.model) == []
    evaluated(duel.model)
    duel.model.offload_to_cpu(kinds=["optimizer_state", "main_gradients"])
    assert gathered(duel.model), "no weights were to move"
    duel.model.reset_iter_state()
    duel.model.offload_to_cpu()
    duel.model.start_weight_gather()
    duel.model.offload_to_cpu()
    assert gathered(duel.model) == []
    duel.train(steps=2)


@case(worlds=(1, 2))
def wrong_arguments(ranks: Ranks) -> None:
    duel = Duel(ranks, Net(), shard_net(ZERO_3))
    offload: Callable[..., Any] = duel.model.offload_to_cpu
    for kind, word, options in (
        (TypeError, "max_cpu_bytes must be a whole number of bytes or None, got 1.5", {"max_cpu_bytes": 1.5}),
        (TypeError, "max_cpu_bytes must be a whole number of bytes or None, got True", {"max_cpu_bytes": True}),
        (ValueError, "max_cpu_bytes must be at least 0, got -1", {"max_cpu_bytes": -1}),
        (TypeError, "pin_memory must be a bool, got 1", {"pin_memory": 1}),
        (TypeError, "kinds must be several of compute_weights", {"kinds": "compute_weights"}),
        (ValueError, "kinds must be of compute_weights", {"kinds": ["weights"]}),
        (ValueError, "kinds is empty; give some of compute_weights", {"kinds": []}),
        (TypeError, "optimizer must be a torch optimizer, several or None, got int", {"optimizer": 3}),
    ):
        with refused(kind, word):
            offload(**options)
    assert duel.model._fsdp_unit.context is None, "nothing was begun"
