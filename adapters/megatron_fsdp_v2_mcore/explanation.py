"""Ends a training run where its first step would begin, with an explanation of the model it would have trained."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn, TextIO


def keep_standard_output() -> TextIO:
    """The present standard output; what this process prints from now on goes to standard error.

    So the explanation can be piped, whatever a training script prints.
    """
    sys.stdout.flush()
    kept = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return kept


def wrap_setup_model_and_optimizer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Explains the model once it is sharded and has its optimizer, and ends the run on all ranks."""

    @functools.wraps(original)
    def setup_model_and_optimizer(*args: Any, **keywords: Any) -> NoReturn:
        import torch.distributed as dist

        from .import_hook import installed_hook

        chunks = original(*args, **keywords)[0]
        hook = installed_hook()
        assert hook is not None
        if dist.get_rank() == 0:
            _write([chunk.root for chunk in chunks], hook.explains_as_json, hook.explains_to or sys.stdout)
        # A rank that left earlier would look like one that failed.
        dist.barrier()
        dist.destroy_process_group()
        raise SystemExit(0)

    return setup_model_and_optimizer


def _write(models: Sequence[Any], as_json: bool, file: TextIO) -> None:
    from megatron_fsdp_v2 import explain
    from megatron_fsdp_v2.explain import describe

    if as_json:
        json.dump([asdict(describe(model)) for model in models], file, indent=2)
        file.write("\n")
    else:
        for model in models:
            explain(model, file=file)
    file.flush()
