"""What CPU emulation changes on Megatron's command line, as rows of the patch table."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

from .import_hook import refuse

# The flag that says the same on the command line, the destination and the value.
DEFAULTS: tuple[tuple[str, str, object], ...] = (
    ("--distributed-backend gloo", "distributed_backend", "gloo"),
    ("--transformer-impl local", "transformer_impl", "local"),
    ("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
    ("--no-persist-layer-norm", "no_persist_layer_norm", True),
    ("--no-masked-softmax-fusion", "masked_softmax_fusion", False),
    ("--no-rope-fusion", "apply_rope_fusion", False),
)


def wrap_add_megatron_arguments(original: Callable[..., argparse.ArgumentParser]) -> Callable[..., Any]:
    """Give the flags that only a GPU can serve the default that a CPU can; a flag of the user's wins."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        parser.set_defaults(**{destination: value for _, destination, value in DEFAULTS})
        return parser

    return add_megatron_arguments


def wrap_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a command line that names what only a GPU has."""

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *rest: Any, **keywords: Any) -> Any:
        problems = _gpu_only(args)
        if problems:
            refuse(problems)
        return original(args, *rest, **keywords)

    return validate_args


def _gpu_only(args: argparse.Namespace) -> list[str]:
    problems = []
    if args.distributed_backend != "gloo":
        problems.append(f"--distributed-backend {args.distributed_backend} needs a GPU; CPU emulation runs on gloo")
    if args.transformer_impl != "local":
        problems.append(f"--transformer-impl {args.transformer_impl} needs a GPU; CPU emulation runs local")
    if getattr(args, "fp8", None) or getattr(args, "fp4", None):
        problems.append("fp8 and fp4 compute need transformer-engine's kernels, which CPU emulation hides")
    return problems
