"""The command line: our flags, what they set, and one line for everything that can't work, before any process group."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from typing import Any, NoReturn

from .flag_combinations import CONTRADICTIONS
from .flags import RULES
from .units import unresolvable_unit_names

FLAG = "--use-megatron-fsdp-v2"
UNITS_FLAG = "--fsdp-unit-modules"
CHECK_FLAG = "--fsdp-check-ranks"
# As in megatron_fsdp_v2.runtime.agreement, which a script that never asks for v2 shouldn't import.
MODES = ("first_step", "always", "never")
CHECKPOINT_FORMAT = "fsdp_dtensor"
EXIT_CODE = 2


def wrap_add_megatron_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adds our argument group to the parser that stock builds."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        group = parser.add_argument_group(title="megatron fsdp v2")
        group.add_argument(
            FLAG,
            action="store_true",
            help="Shard the model with megatron_fsdp_v2. Implies --use-megatron-fsdp and --use-distributed-optimizer.",
        )
        group.add_argument(
            UNITS_FLAG,
            nargs="+",
            default=[],
            metavar="CLASS",
            help="Classes whose modules are sharded as one unit each, by name (TransformerLayer) or by path "
            "(package.module.Class), instead of the default transformer and Mamba layers.",
        )
        group.add_argument(
            CHECK_FLAG,
            choices=[mode.replace("_", "-") for mode in MODES],
            default="first-step",
            help="When ranks compare, before each collective, what they are about to do, to name the unit they "
            "disagree on rather than hang. In every step it costs a small blocking collective each.",
        )
        _refuse_yaml(sys.argv)
        return parser

    return add_megatron_arguments


def wrap_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checks a run that asked for v2 before stock does, and hands stock what it expects of a sharded run."""

    @functools.wraps(original)
    def validate_args(args: Namespace, defaults: dict[str, Any] | None = None) -> Any:
        if problems := problems_of(args):
            refuse(problems)
        if asks_for_v2(args):
            _warn_about_idle_flags(args)
            _imply(args)
        return original(args, {} if defaults is None else defaults)

    return validate_args


def asks_for_v2(args: Namespace) -> bool:
    """Whether the run was started with our flag."""
    return bool(getattr(args, "use_megatron_fsdp_v2", False))


def problems_of(args: Namespace) -> list[str]:
    """One line for each setting that v2 can't honour; empty for a run that may start."""
    unit_names = getattr(args, "fsdp_unit_modules", None) or []
    if not asks_for_v2(args):
        return [f"{UNITS_FLAG} needs {FLAG}"] if unit_names else []
    problems = [
        f"{rule.flag} is not supported with {FLAG}: {rule.note}"
        for rule in RULES
        if rule.verdict == "refused" and rule.given is not None and rule.given(args)
    ]
    problems += [contradiction.message for contradiction in CONTRADICTIONS if contradiction.holds(args)]
    problems += [f"{UNITS_FLAG} {name}: {reason}" for name, reason in unresolvable_unit_names(unit_names)]
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        problems.append("CUDA_DEVICE_MAX_CONNECTIONS=1 serialises communication with computation: unset it")
    return problems


def refuse(problems: list[str]) -> NoReturn:
    """Ends this process; rank 0 prints the problems, one per line."""
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write("".join(f"megatron_fsdp_v2: {problem}\n" for problem in problems))
        sys.stderr.flush()
    raise SystemExit(EXIT_CODE)


def _refuse_yaml(argv: list[str]) -> None:
    """Stock takes every setting from the file then and never calls `validate_args`, so our flag would be lost."""
    if FLAG in argv and any(word.split("=")[0] == "--yaml-cfg" for word in argv):
        refuse([f"--yaml-cfg is not supported with {FLAG}: {_note('--yaml-cfg')}"])


def _note(flag: str) -> str:
    return next(rule.note for rule in RULES if rule.flag == flag)


def _warn_about_idle_flags(args: Namespace) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    for rule in RULES:
        if rule.verdict == "no effect" and rule.given is not None and rule.given(args):
            warnings.warn(f"{rule.flag} has no effect with {FLAG}: {rule.note}", stacklevel=3)


def _imply(args: Namespace) -> None:
    args.use_megatron_fsdp = True
    args.use_distributed_optimizer = True
    args.ckpt_format = CHECKPOINT_FORMAT
    args.gradient_accumulation_fusion = False
