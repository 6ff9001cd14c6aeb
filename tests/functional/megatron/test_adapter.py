"""The wrapper and the optimizer as stock code meets them, and the settings that parity runs don't show."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.functional.megatron import inspections
from tests.functional.megatron.cases import Case, Record, relative_differences
from tests.functional.megatron.driver import run_cases
from tests.harness.spawn import RankPool

V2 = "--use-megatron-fsdp-v2"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
NO_BIAS = "--disable-bias-linear"
SHORT = "--train-iters 2 --lr-warmup-iters 0"
INSTANCES = "--num-distributed-optimizer-instances 2"
TIMEOUT = 540.0
Ranks = Callable[[int], RankPool]
Records = dict[str, Record]


def _case(name: str, flags: str, inspect: Callable[[Any, Any], Any] | None = None) -> Case:
    return Case(name, tuple(flags.split()), inspect)


def _reductions(strategy: str, overlap: str) -> Case:
    flags = f"{V2} --data-parallel-sharding-strategy {strategy} {overlap}"
    return _case(f"{strategy} {overlap}".strip(), flags, inspections.gradients_before_the_finish)


CASES = [
    _case("stock", "--use-distributed-optimizer"),
    _case("contract", f"{V2} --bf16 {SHORT}", inspections.contract),
    _case("untied", f"{V2} --untie-embeddings-and-output-weights {SHORT}", inspections.units),
    _case("named units", f"{V2} {NO_BIAS} --fsdp-unit-modules SelfAttention MLP", inspections.units),
    _case("stock, no bias", f"--use-distributed-optimizer {NO_BIAS}"),
    _case(
        "stock's own sharding",
        f"--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer --bf16 {SHORT}",
    ),
    _case("meta", f"{V2} --init-model-with-meta-device --use-cpu-initialization", inspections.initial_weights),
    _case(
        "norms on meta",
        f"{V2} --init-model-with-meta-device --position-embedding-type learned_absolute",
        inspections.initial_weights,
    ),
    _case("random init, replicated", f"{V2} --data-parallel-sharding-strategy no_shard --data-parallel-random-init"),
    _case("random init, sharded", f"{V2} --data-parallel-random-init"),
    _case("bf16 main weights", f"{V2} --bf16 --megatron-fsdp-main-params-dtype bf16"),
    _case("bf16 main gradients", f"{V2} --bf16 --megatron-fsdp-main-grads-dtype bf16"),
    _case("bf16 communication", f"{V2} --megatron-fsdp-grad-comm-dtype bf16"),
    _reductions("optim", ""),
    _reductions("optim", OVERLAP),
    _reductions("optim_grads", ""),
    _reductions("no_shard", ""),
]


@pytest.fixture(scope="module")
def both_ranks(ranks: Ranks) -> list[Records]:
    return ranks(2).run(run_cases, CASES, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def records(both_ranks: list[Records]) -> Records:
    return both_ranks[0]


def test_stock_code_finds_what_it_asks_for(records: Records) -> None:
    seen = records["contract"].inspected
    assert seen["missing"] == []
    assert seen["answered early"] == []
    assert seen["answered by"] == {"Float16Module", "FSDPGPTModel"}
    assert seen["wrapper"]
    assert seen["inside"]
    assert seen["unwrapped"]
    assert seen["optimizer"] == ("FSDPv2DistributedOptimizer", True)


def test_parameters_look_as_stock_expects(records: Records) -> None:
    seen = records["contract"].inspected
    assert seen["dtensors"]
    assert seen["marked"]
    assert seen["main grads"] == []
    assert seen["dtypes"] == {torch.float32}
    assert all(name.startswith("module.module.") for name in seen["names"])
    assert "module.module.decoder.layers.1.mlp.linear_fc2.weight" in seen["names"]
    parallel = {name.split(".")[-2] for name in seen["tensor parallel"]}
    assert parallel == {"word_embeddings", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}
    assert sorted(mult for mult, _ in seen["groups"]) == [0.0, 1.0]
    assert seen["optimized"] == len(seen["names"])


def test_units_follow_the_model_and_the_flag(records: Records) -> None:
    layers = ["FSDPTransformerLayer"] * 2
    assert records["contract"].inspected["units"] == ["FSDPGPTModel", *layers]
    assert records["untied"].inspected == [
        "FSDPGPTModel",
        "FSDPLanguageModelEmbedding",
        *layers,
        "FSDPColumnParallelLinear",
    ]
    assert records["named units"].inspected == ["FSDPGPTModel", *["FSDPSelfAttention", "FSDPMLP"] * 2]
    assert max(relative_differences(records["named units"].losses, records["stock, no bias"].losses)) < 1e-6


def test_without_our_flag_stock_builds_its_own(records: Records) -> None:
    assert records["stock's own sharding"].wrapper == "FullyShardedDataParallel"
    assert records["stock"].wrapper == "DistributedDataParallel"


@pytest.mark.parametrize("name", ["meta", "norms on meta"])
def test_a_model_built_on_meta_is_initialised_and_learns(records: Records, name: str) -> None:
    record = records[name]
    for path, (mean, deviation) in record.inspected.items():
        if path.endswith("bias"):
            assert (mean, deviation) == (0.0, 0.0), path
        elif "layernorm" in path:
            assert (mean, deviation) == (1.0, 0.0), path
        else:
            # Stock scales the layers that write into the residual stream down by the square root of twice the depth.
            expected = 0.01 if "linear_proj" in path or "linear_fc2" in path else 0.02
            assert abs(mean) < expected / 5, path
            assert 0.8 < deviation / expected < 1.2, path
    assert record.losses[-1] < record.losses[0] - 0.2


@pytest.mark.parametrize("name", ["random init, replicated", "random init, sharded"])
def test_randomly_initialised_replicas_agree(both_ranks: list[Records], name: str) -> None:
    first, second = (records[name].weights_checksum for records in both_ranks)
    assert first == second
    # The first rank's seed is the one all ranks have otherwise, and replicas follow it.
    differences = relative_differences(both_ranks[0][name].losses, both_ranks[0]["stock"].losses)
    assert (max(differences) < 1e-6) == (name == "random init, replicated")
    assert both_ranks[0][name].losses[-1] < both_ranks[0][name].losses[0] - 0.2


@pytest.mark.parametrize("name", ["bf16 main weights", "bf16 main gradients", "bf16 communication"])
def test_dtype_flags_change_the_numbers_a_little(records: Records, name: str) -> None:
    differences = relative_differences(records[name].losses, records["stock"].losses)
    assert 0.0 < max(differences) < 2e-2
    weights = records[name].weights.values()
    rounded = all(torch.equal(weight, weight.bfloat16().float()) for weight in weights)
    assert rounded == (name == "bf16 main weights")


def test_partial_gradients_are_reduced_once_per_step(records: Records) -> None:
    total = len(records["stock"].weights)
    for name, before in (("optim", 0), ("no_shard", 0), (f"optim {OVERLAP}", total), ("optim_grads", total)):
        assert set(records[name].inspected) == {(before, total)}, name


def _random_init_on_instances(rank: int, world_size: int) -> Record:
    flags = f"{V2} {INSTANCES} --data-parallel-random-init {SHORT}"
    return run_cases(rank, world_size, [_case("instances", flags)])["instances"]


def test_instances_agree_after_random_initialisation(ranks: Ranks) -> None:
    checksums = {record.weights_checksum for record in ranks(4).run(_random_init_on_instances, timeout=300)}
    assert len(checksums) == 1


def _sharded_linear() -> nn.Module:
    from megatron_fsdp_v2 import fully_shard

    torch.manual_seed(0)
    # Three ranks: the second bias has one row, so two of them hold none of it.
    return fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))


class _LikeAFusedKernel(torch.optim.Optimizer):
    """Leaves the rest of its list unchanged behind an empty tensor, as some fused kernels do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            present = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in present:
                if parameter.to_local().numel() == 0:
                    break
                parameter.to_local().sub_(parameter.grad.to_local(), alpha=group["lr"])


def _small_checks(rank: int, world_size: int) -> tuple[dict[str, str], tuple[bool, bool]]:
    from megatron_fsdp_v2_mcore import cpu_emulation, register

    cpu_emulation.enable()
    register()
    return _poisoned_gradients(rank), _step_with_empty_shards()


def _poisoned_gradients(rank: int) -> dict[str, str]:
    """What the gradient check ends with on this rank after one element on rank 0 took the given value."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
    from megatron_fsdp_v2_mcore.gradient_checks import check_gradients

    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    model = _sharded_linear()
    model(torch.ones(2, 3)).sum().backward()
    parameters = dict(model.named_parameters())
    config = DistributedDataParallelConfig(check_for_nan_in_grad=True)
    messages = {}
    for value in ("1", "nan", "inf"):
        if rank == 0:
            parameters["0.weight"].grad.to_local()[0, 0] = float(value)
        try:
            check_gradients(config, parameters, dist.group.WORLD)
            messages[value] = ""
        except RuntimeError as error:
            messages[value] = str(error)
    return messages


def _step_with_empty_shards() -> tuple[bool, bool]:
    """Whether this rank holds an empty shard, and whether all its other shards moved."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    model = _sharded_linear()
    model(torch.ones(2, 3)).sum().backward()
    shards = [parameter.to_local() for parameter in model.parameters()]
    before = [shard.clone() for shard in shards]
    ddp_config = SimpleNamespace(
        use_megatron_fsdp=True,
        use_megatron_fsdp_v2=True,
        overlap_param_gather=False,
        outer_dp_sharding_strategy="no_shard",
    )
    chunk = SimpleNamespace(
        ddp_config=ddp_config, mark_weights_updated=model.mark_weights_updated, start_param_sync=lambda: None
    )
    inner = _LikeAFusedKernel(reversed(list(model.parameters())), lr=0.1)
    optimizer = DistributedOptimizer(inner, OptimizerConfig(bf16=True), None, None, [chunk])
    assert optimizer.step_with_ready_grads()
    moved = [not torch.equal(old, new) for old, new in zip(before, shards, strict=True) if new.numel()]
    assert all(parameter.grad is not None for parameter in model.parameters())
    return any(shard.numel() == 0 for shard in shards), all(moved)


@pytest.fixture(scope="module")
def small_checks(ranks: Ranks) -> list[tuple[dict[str, str], tuple[bool, bool]]]:
    return ranks(3).run(_small_checks, timeout=300)


def test_a_broken_gradient_ends_the_run_on_every_rank(
    small_checks: list[tuple[dict[str, str], tuple[bool, bool]]],
) -> None:
    messages = [messages for messages, _ in small_checks]
    assert [found["1"] for found in messages] == [""] * 3
    for value, word in (("nan", "NaN"), ("inf", "Inf")):
        for found in messages[1:]:
            assert f"found {word} in the reduced gradients, on other ranks" in found[value]
        assert f"found {word} in the reduced gradients of 0.weight" in messages[0][value]


def test_a_fused_optimizer_never_sees_an_empty_shard(
    small_checks: list[tuple[dict[str, str], tuple[bool, bool]]],
) -> None:
    results = [result for _, result in small_checks]
    assert any(has_empty for has_empty, _ in results), "no rank has an empty shard, so nothing was tested"
    assert all(moved for _, moved in results)
