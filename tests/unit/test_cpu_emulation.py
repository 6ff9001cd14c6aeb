"""CPU emulation: what stands in for CUDA, what users are told, and that all of it can be taken back."""

from __future__ import annotations

import argparse
import importlib
import logging
import operator
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron_fsdp_v2_mcore import cpu_emulation as emulation
from megatron_fsdp_v2_mcore import import_hook
from megatron_fsdp_v2_mcore.bootstrap import ENV_CPU_EMULATION
from megatron_fsdp_v2_mcore.cpu_flags import DEFAULTS, wrap_add_megatron_arguments, wrap_validate_args
from megatron_fsdp_v2_mcore.cpu_megatron import wrap_maybe_move_tensor_to_cpu
from megatron_fsdp_v2_mcore.cpu_stand_ins import stand_ins

from tests.harness.command import run_command


@pytest.fixture
def emulated() -> Iterator[None]:
    """Emulation although the machine that runs the tests may have a GPU."""
    with emulation.cpu_emulation(force=True):
        yield


@pytest.fixture(autouse=True)
def _first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "LOCAL_RANK", ENV_CPU_EMULATION):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 1), 0])
def test_everything_lands_on_the_cpu(device: Any) -> None:
    source = torch.ones(2, 3, dtype=torch.float64)
    made = [
        torch.zeros(2, device=device),
        torch.tensor([1.0], device=device),
        torch.arange(3, device=device),
        torch.empty_like(source, device=device),
        source.new_zeros(4, device=device),
        source.to(device),
        source.to(device, torch.float32),
        source.to(device=device, dtype=torch.float32, non_blocking=True),
        source.cuda(),
        torch.empty(2, pin_memory=True),
        source.pin_memory(),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.nn.Linear(2, 2).cuda().weight,
        torch.nn.Linear(2, 2).to(device).weight,
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}
    assert source.to(device, torch.float32).dtype == torch.float32
    assert not made[9].is_pinned()


@pytest.mark.usefixtures("emulated")
def test_other_devices_and_casts_are_left_alone() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"
    assert torch.ones(2).to(torch.bfloat16).dtype == torch.bfloat16
    assert torch.ones(2).type(torch.int32).dtype == torch.int32


@pytest.mark.usefixtures("emulated")
def test_streams_and_events_are_in_order_already() -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        tensor = torch.ones(2)
        event.record()
        tensor.record_stream(side)
    torch.cuda.current_stream().wait_stream(side)
    side.wait_event(event)
    torch.cuda.synchronize()
    assert side.record_event().query()
    assert event.elapsed_time(torch.cuda.Event()) == 0.0


@pytest.mark.usefixtures("emulated")
def test_the_cuda_random_state_is_the_state_of_the_cpu_generator() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3))
    assert torch.cuda.default_generators[torch.cuda.current_device()] is torch.default_generator


@pytest.mark.usefixtures("emulated")
def test_optimizers_step_and_sort_by_the_type_names_they_know() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    assert parameter.type() == "torch.cuda.BFloat16Tensor"
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter]).step()
    assert torch.isfinite(parameter).all()


def test_leaving_restores_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    hidden = {name: sys.modules.get(name, "absent") for name in emulation.BLOCKED_PACKAGES}
    places = [(row.owner, row.name) for row in stand_ins()]

    def values() -> list[object]:
        return [vars(owner).get(name, "absent") for owner, name in places]

    before, environment = values(), dict(os.environ)
    filters = list(logging.getLogger(emulation.RANDOM_STATES).filters)
    with emulation.cpu_emulation(force=True):
        assert not any(map(operator.is_, values(), before))
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
        assert os.environ[ENV_CPU_EMULATION] == "force"
        for name in emulation.BLOCKED_PACKAGES:
            with pytest.raises(ImportError):
                importlib.import_module(name)
    assert all(map(operator.is_, values(), before))
    assert dict(os.environ) == environment
    assert {name: sys.modules.get(name, "absent") for name in emulation.BLOCKED_PACKAGES} == hidden
    assert logging.getLogger(emulation.RANDOM_STATES).filters == filters
    assert import_hook.installed_hook() is None


def test_every_stand_in_replaces_something_once_and_says_why() -> None:
    rows = stand_ins()
    assert all(row.reason for row in rows)
    places = [(id(row.owner), row.name) for row in rows]
    assert len(set(places)) == len(places)
    # `device_memory_used` needs NVIDIA's management library and is missing from some builds.
    assert [row.name for row in rows if not hasattr(row.owner, row.name)] in ([], ["device_memory_used"])


def test_it_is_announced_by_rank_zero_alone_and_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with emulation.cpu_emulation(force=True):
        emulation.enable(force=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"megatron_fsdp_v2: CPU emulation is on: {len(stand_ins())} stand-ins for CUDA")
    assert lines[1].endswith(" ".join(flag for flag, _, _ in DEFAULTS))
    with monkeypatch.context() as second_rank:
        second_rank.setenv("RANK", "1")
        with emulation.cpu_emulation(force=True):
            assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", "spawn_main()", "--multiprocessing-fork"])
    with emulation.cpu_emulation(force=True):
        assert capsys.readouterr().err == ""


def test_a_gpu_is_not_hidden_without_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
    with pytest.raises(RuntimeError, match=r"has a GPU \(Test GPU\).*CUDA_VISIBLE_DEVICES= .*=force"):
        emulation.enable()
    assert not emulation.enabled()
    monkeypatch.setenv(ENV_CPU_EMULATION, "force")
    with emulation.cpu_emulation():
        assert emulation.enabled()


def test_it_comes_before_megatron_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = types.ModuleType(emulation.RANDOM_STATES)
    loaded._lazy_init = torch.cuda._lazy_init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, emulation.RANDOM_STATES, loaded)
    with pytest.raises(RuntimeError, match=r"before megatron\.core is imported"):
        emulation.enable(force=True)
    assert not emulation.enabled()


def _parser(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--distributed-backend", default="nccl")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--no-persist-layer-norm", action="store_true")
    parser.add_argument("--no-rope-fusion", action="store_false", dest="apply_rope_fusion")
    return parser


def test_defaults_become_what_a_cpu_can_do_and_flags_win() -> None:
    parser = wrap_add_megatron_arguments(_parser)(argparse.ArgumentParser())
    args = parser.parse_args(["--transformer-impl", "inference_optimized"])
    assert (args.distributed_backend, args.transformer_impl) == ("gloo", "inference_optimized")
    assert (args.no_persist_layer_norm, args.apply_rope_fusion) == (True, False)


def test_what_needs_a_gpu_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    validate = wrap_validate_args(lambda args, defaults=None: (args, defaults))
    wrong = argparse.Namespace(distributed_backend="nccl", transformer_impl="transformer_engine", fp8="e4m3")
    with pytest.raises(SystemExit) as refusal:
        validate(wrong)
    assert refusal.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["--distributed-backend", "--transformer-impl", "fp8"]
    right = argparse.Namespace(distributed_backend="gloo", transformer_impl="local")
    assert validate(right, defaults={"a": 1}) == (right, {"a": 1})


def test_split_sizes_become_numpy_where_callers_ask_for_it() -> None:
    moved = wrap_maybe_move_tensor_to_cpu(lambda tensor, as_numpy, record_stream: tensor)
    sizes = torch.tensor([3, 4])
    assert moved(sizes, as_numpy=True).tolist() == [3, 4]
    assert not isinstance(moved(sizes, as_numpy=True), torch.Tensor)
    assert moved(sizes) is sizes
    assert moved(None, as_numpy=True) is None


LEAVES_ITS_GROUP = """
import atexit
import torch.distributed as dist
# Called after whatever is registered later.
atexit.register(lambda: print("group left:", dist.is_initialized()))
from megatron_fsdp_v2_mcore import cpu_emulation
cpu_emulation.enable(force=True)
if {disable}:
    cpu_emulation.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


@pytest.mark.parametrize("disable", [False, True])
def test_process_groups_end_with_an_emulated_run(disable: bool) -> None:
    finished = run_command([sys.executable, "-c", LEAVES_ITS_GROUP.format(disable=disable)])
    assert f"group left: {disable}" in finished.output
