"""Checks on the command line that need no Megatron."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from megatron_fsdp_v2_mcore.arguments import EXIT_CODE, FLAG, problems_of, refuse, wrap_validate_args
from megatron_fsdp_v2_mcore.flags import RULES, render_tables

DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs" / "flags.md"


def arguments(**changes: object) -> Namespace:
    """What stock's parser returns for a run with our flag, as far as the checks read it."""
    usual = {
        "use_megatron_fsdp_v2": True,
        "fsdp_unit_modules": [],
        "world_size": 4,
        "data_parallel_sharding_strategy": "optim_grads_params",
        "outer_dp_sharding_strategy": "no_shard",
        "num_distributed_optimizer_instances": 1,
        "init_model_with_meta_device": False,
        "overlap_param_gather": False,
        "overlap_grad_reduce": False,
    }
    return Namespace(**{**usual, **changes})


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.delenv("RANK", raising=False)


def test_a_plain_run_has_no_problem() -> None:
    assert problems_of(arguments()) == []


def test_a_run_without_our_flag_is_not_judged() -> None:
    assert problems_of(arguments(use_megatron_fsdp_v2=False, async_save=True, tensor_model_parallel_size=2)) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"outer_dp_sharding_strategy": "optim"}, ["--num-distributed-optimizer-instances above 1"]),
        (
            {
                "outer_dp_sharding_strategy": "optim",
                "num_distributed_optimizer_instances": 2,
                "data_parallel_sharding_strategy": "optim_grads",
            },
            ["--data-parallel-sharding-strategy optim_grads_params"],
        ),
        (
            {"num_distributed_optimizer_instances": 2, "data_parallel_sharding_strategy": "no_shard"},
            ["no_shard"],
        ),
        ({"num_distributed_optimizer_instances": 3}, ["must divide"]),
        (
            {"init_model_with_meta_device": True, "data_parallel_sharding_strategy": "no_shard"},
            ["--init-model-with-meta-device"],
        ),
        ({"num_distributed_optimizer_instances": 4, "tensor_model_parallel_size": 2}, ["must divide"]),
        ({"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_tensor_parallel_size": 2}, []),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, ["has to be the tensor-parallel size"]),
        ({"tensor_model_parallel_size": 2, "softmax_type": "learnable"}, ["--softmax-type learnable"]),
        ({"pipeline_model_parallel_size": 2}, ["pipeline parallelism is not supported yet"]),
        ({"expert_model_parallel_size": 2}, ["expert parallelism is not supported yet"]),
        ({"overlap_param_gather": True}, ["--overlap-grad-reduce"]),
        ({"fsdp_unit_modules": ["no.such.Class"]}, ["no.such.Class"]),
        ({"fsdp_unit_modules": ["json.dumps"]}, ["is not a module class"]),
        ({"fsdp_unit_modules": ["Linear", "torch.nn.Linear"]}, []),
        ({"use_megatron_fsdp_v2": False, "fsdp_unit_modules": ["Linear"]}, [f"needs {FLAG}"]),
        (
            {"overlap_dispatch_backward_with_experts_wgrad": True, "delay_wgrad_compute": True},
            ["--delay-wgrad-compute", "--overlap-dispatch-backward-with-experts-wgrad"],
        ),
        ({"save_params_interval": 5}, ["--save-params-interval"]),
        (
            {"async_save": True, "ckpt_convert_format": "torch", "nccl_ub": True},
            ["--use-nccl-ub", "--async-save", "--ckpt-convert-format"],
        ),
    ],
)
def test_each_problem_is_one_line(changes: dict[str, object], expected: list[str]) -> None:
    problems = problems_of(arguments(**changes))
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem
        assert "\n" not in problem


def test_instances_without_einops_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fsdp_v2_mcore.flag_combinations.find_spec", lambda name: None)
    assert problems_of(arguments()) == []
    (problem,) = problems_of(arguments(num_distributed_optimizer_instances=2))
    assert "einops" in problem


def test_serialised_launches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert [problem for problem in problems_of(arguments()) if "CUDA_DEVICE_MAX_CONNECTIONS" in problem]


def test_only_rank_zero_speaks_and_all_ranks_end_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, lines in (("0", ["megatron_fsdp_v2: one", "megatron_fsdp_v2: two"]), ("3", [])):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            refuse(["one", "two"])
        assert ended.value.code == EXIT_CODE
        assert capsys.readouterr().err.splitlines() == lines


def test_stock_sees_its_own_flags_set_and_is_not_reached_after_a_problem() -> None:
    seen: list[Namespace] = []
    validate = wrap_validate_args(lambda args, defaults: seen.append(args))
    validate(arguments(), {})
    assert seen[0].use_megatron_fsdp
    assert seen[0].use_distributed_optimizer
    assert seen[0].ckpt_format == "fsdp_dtensor"
    assert not seen[0].gradient_accumulation_fusion
    with pytest.raises(SystemExit):
        validate(arguments(async_save=True), {})
    assert len(seen) == 1


def test_a_run_without_our_flag_reaches_stock_unchanged() -> None:
    args = Namespace(ckpt_format="torch_dist")
    wrap_validate_args(lambda args, defaults: None)(args, {})
    assert vars(args) == {"ckpt_format": "torch_dist"}


def test_idle_flags_warn_once_on_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    validate = wrap_validate_args(lambda args, defaults: None)
    with pytest.warns(UserWarning, match="--ddp-bucket-size has no effect") as caught:
        validate(arguments(ddp_bucket_size=1000), {})
    assert len(caught) == 1
    monkeypatch.setenv("RANK", "1")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate(arguments(ddp_bucket_size=1000), {})


def test_every_judged_flag_can_be_noticed() -> None:
    assert not [rule.flag for rule in RULES if rule.verdict != "honoured" and rule.given is None]
    assert len({rule.flag for rule in RULES}) == len(RULES)


def test_the_documentation_holds_the_table() -> None:
    assert render_tables() in DOCUMENTATION.read_text(), (
        "docs/flags.md is out of date: python -m megatron_fsdp_v2_mcore.flags prints its tables"
    )
