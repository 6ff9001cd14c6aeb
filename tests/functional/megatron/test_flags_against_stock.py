"""The flag table beside the installed Megatron's own parser, and a run through its `validate_args`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from megatron_fsdp_v2_mcore.arguments import wrap_validate_args
from megatron_fsdp_v2_mcore.flags import RULES

from tests.harness.spawn import RankPool

# Names that speak of data-parallel sharding, its communication, or its dtypes.
RELATED = re.compile(
    r"fsdp|ddp|shard|grad-reduce|allreduce|param-gather|nccl-ub|all-gather-group|distributed-optimizer|"
    r"main-(params|grads)|data-parallel|meta-device|double-buffer|communication-unit"
)
# Sharding of something else: input data, and a model for inference.
UNRELATED = {
    "--no-data-sharding",
    "--inference-shards",
    "--use-megatron-fsdp-v2",
    "--fsdp-unit-modules",
    "--fsdp-check-ranks",
}

MINIMAL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "32",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "16",
    "--max-position-embeddings",
    "16",
    "--micro-batch-size",
    "1",
    "--train-iters",
    "2",
    "--lr",
    "1e-3",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "64",
    "--transformer-impl",
    "local",
    "--use-megatron-fsdp-v2",
]


# What a flag needs beside it, or a value that the first choice wouldn't show.
SAMPLES = {
    "--ckpt-format": ["--ckpt-format", "torch_dcp"],
    "--overlap-param-gather": ["--overlap-param-gather", "--overlap-grad-reduce"],
    "--outer-dp-sharding-strategy": [
        *("--outer-dp-sharding-strategy", "optim"),
        *("--num-distributed-optimizer-instances", "2"),
    ],
}


def collect_facts(rank: int, world_size: int) -> dict[str, Any]:
    """Everything the tests below compare, from one process that has Megatron imported."""
    from megatron_fsdp_v2_mcore import cpu_emulation, register

    cpu_emulation.enable()
    register()
    os.environ["WORLD_SIZE"] = "4"
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.training import arguments, training

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {
        "options": [(action.option_strings, action.dest) for action in parser._actions],
        "ddp_fields": {field.name for field in dataclasses.fields(DistributedDataParallelConfig)},
        "usual": _attempt(arguments, []),
        "attempts": {rule.flag: _attempt(arguments, _sample(parser, rule.flag)) for rule in RULES},
        "both": _attempt(arguments, ["--async-save", "--use-nccl-ub", "--optimizer", "muon"]),
        "yaml": _attempt(arguments, ["--yaml-cfg", "x"]),
        "ddp_config": _ddp_config(arguments, training, ["--bf16", "--fsdp-unit-modules", "Linear"]),
    }


def _sample(parser: argparse.ArgumentParser, flag: str) -> list[str]:
    """The flag with a value that isn't its default."""
    if flag in SAMPLES:
        return SAMPLES[flag]
    action = parser._option_string_actions[flag]
    if action.nargs == 0:
        return [flag]
    if action.choices:
        return [flag, next(str(choice) for choice in reversed(list(action.choices)) if choice != action.default)]
    return [flag, "2" if action.type in (int, float) else "x"]


@contextlib.contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    with mock.patch.object(sys, "argv", ["script", *MINIMAL, *words]):
        yield


def _attempt(arguments: Any, words: list[str]) -> tuple[object, list[str], list[str]]:
    """Exit code (None: the arguments passed our checks), lines on standard error, warnings of ours."""
    printed = io.StringIO()
    code: object = None
    with _command_line(words), warnings.catch_warnings(record=True) as caught, contextlib.redirect_stderr(printed):
        warnings.simplefilter("always")
        try:
            # Without the emulation's own checks, which refuse some flags before ours do.
            wrap_validate_args(inspect.unwrap(arguments.validate_args))(arguments.parse_args())
        except SystemExit as ended:
            code = ended.code
        except (AssertionError, ValueError, RuntimeError):
            # Stock's own checks, which ask for other flags beside this one; ours have passed.
            pass
    ours = [line for line in printed.getvalue().splitlines() if line.startswith("megatron_fsdp_v2: --")]
    return code, ours, [str(warning.message) for warning in caught if "has no effect with" in str(warning.message)]


def _ddp_config(arguments: Any, training: Any, words: list[str]) -> dict[str, Any]:
    with _command_line(words):
        args = arguments.parse_args()
        arguments.validate_args(args)
        config = training.get_megatron_ddp_config(args)
    return {"type": type(config).__name__, **dataclasses.asdict(config)}


@pytest.fixture(scope="module")
def facts(ranks: Callable[[int], RankPool]) -> dict[str, Any]:
    return ranks(1).run(collect_facts, timeout=300)[0]  # type: ignore[no-any-return]


def test_the_table_misses_no_related_flag(facts: dict[str, Any]) -> None:
    listed = {rule.flag for rule in RULES}
    missing = []
    for names, dest in facts["options"]:
        related = any(RELATED.search(name) for name in names) or dest in facts["ddp_fields"]
        if related and not listed.intersection(names) and not UNRELATED.intersection(names):
            missing.append(names)
    assert not missing


def test_the_table_names_flags_that_exist(facts: dict[str, Any]) -> None:
    known = {name for names, _ in facts["options"] for name in names}
    assert not {rule.flag for rule in RULES} - known


def test_a_usual_run_passes_without_a_word(facts: dict[str, Any]) -> None:
    assert facts["usual"] == (None, [], [])


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.verdict == "refused"], ids=lambda rule: rule.flag)
def test_a_refused_flag_ends_the_run_with_its_line(facts: dict[str, Any], rule: Any) -> None:
    code, lines, _ = facts["attempts"][rule.flag]
    assert code == 2
    assert [line for line in lines if line.startswith(f"megatron_fsdp_v2: {rule.flag} ") and rule.note in line]


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.verdict == "no effect"], ids=lambda rule: rule.flag)
def test_an_idle_flag_warns_once_and_goes_on(facts: dict[str, Any], rule: Any) -> None:
    code, lines, notices = facts["attempts"][rule.flag]
    assert (code, lines) == (None, [])
    assert notices == [f"{rule.flag} has no effect with --use-megatron-fsdp-v2: {rule.note}"]


def test_an_honoured_flag_is_not_remarked_on(facts: dict[str, Any]) -> None:
    for rule in RULES:
        if rule.verdict == "honoured":
            code, lines, notices = facts["attempts"][rule.flag]
            assert (rule.flag, code, lines, notices) == (rule.flag, None, [], [])


def test_all_problems_are_reported_together(facts: dict[str, Any]) -> None:
    code, lines, _ = facts["both"]
    assert code == 2
    assert [line.split()[1] for line in lines] == ["--use-nccl-ub", "--optimizer", "--async-save"]


def test_a_settings_file_is_refused_before_stock_reads_it(facts: dict[str, Any]) -> None:
    code, lines, _ = facts["yaml"]
    assert code == 2
    assert len(lines) == 1


def test_our_settings_reach_the_data_parallel_configuration(facts: dict[str, Any]) -> None:
    config = facts["ddp_config"]
    assert config["type"] == "FSDPv2DDPConfig"
    assert config["use_megatron_fsdp_v2"]
    assert config["use_megatron_fsdp"]
    assert config["fsdp_unit_modules"] == ("Linear",)
    assert config["grad_reduce_in_fp32"]
    assert config["data_parallel_sharding_strategy"] == "optim_grads_params"
