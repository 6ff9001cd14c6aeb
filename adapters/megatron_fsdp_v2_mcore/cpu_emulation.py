"""Stock Megatron on a machine without a GPU, over gloo.

Asked for by `MEGATRON_FSDP_V2_CPU_EMULATION=1` or `mfsdp2 run --cpu-emulation`, with or without v2. The stand-ins for
`torch.cuda` are in `cpu_stand_ins.py`, the changes inside Megatron are rows of the patch table. It shows that control
flow, collectives and numbers are right; stream order, memory and speed of a GPU can't be seen here.
"""

import atexit
import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from . import import_hook, patches
from .bootstrap import ENV_CPU_EMULATION
from .cpu_flags import DEFAULTS
from .patches import CPU

FORCE = "force"

# Their kernels run on CUDA only, and a half-installed copy ends the import of megatron.core.
BLOCKED_PACKAGES = ("transformer_engine", "apex")

# Takes names out of torch.cuda when it is imported, so it shows whether Megatron came before the stand-ins.
RANDOM_STATES = "megatron.core.tensor_parallel.random"

_ABSENT = object()


class _OneGenerator(logging.Filter):
    """Drops a warning that's only true of two generators: under emulation the CUDA states are states of the CPU's."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")


def enabled() -> bool:
    """Whether the stand-ins are in place in this process."""
    hook = import_hook.installed_hook()
    return hook is not None and hook.undo_cpu_emulation is not None


def enable(force: bool = False) -> None:
    """Put the stand-ins in place, announce it on standard error of rank 0, and pass it on to child processes.

    Args:
        force: go ahead although there is a GPU; the environment variable's value `force` means the same.

    Raises:
        RuntimeError: a GPU is present and `force` wasn't given, or Megatron is imported already.
    """
    if enabled():
        return
    import torch

    from .cpu_stand_ins import stand_ins

    force = force or os.environ.get(ENV_CPU_EMULATION) == FORCE
    if torch.cuda.is_available() and not force:
        raise RuntimeError(
            f"CPU emulation was asked for, but this machine has a GPU ({torch.cuda.get_device_name()}). "
            f"Hide it with CUDA_VISIBLE_DEVICES= (empty), or set {ENV_CPU_EMULATION}={FORCE}"
        )
    random_states = patches.imported_module(RANDOM_STATES)
    if random_states is not None and random_states._lazy_init is torch.cuda._lazy_init:
        raise RuntimeError("CPU emulation has to be switched on before megatron.core is imported")
    table = stand_ins()
    with ExitStack() as undo:
        for row in table:
            _replace(undo, row.owner, row.name, row.make(getattr(row.owner, row.name, None)))
        for package in BLOCKED_PACKAGES:
            _replace_item(undo, sys.modules, package, None)
        _replace_item(undo, os.environ, ENV_CPU_EMULATION, FORCE if force else "1")
        _forbid_compilation(undo)
        _end_groups_at_exit(undo)
        _add_log_filter(undo, RANDOM_STATES, _OneGenerator())
        import_hook.install(cpu_emulation=True).undo_cpu_emulation = undo.pop_all().close
    _announce(len(table))


def disable() -> None:
    """Put everything back as it was before `enable`."""
    hook = import_hook.installed_hook()
    if hook is not None and hook.undo_cpu_emulation is not None:
        undo, hook.undo_cpu_emulation = hook.undo_cpu_emulation, None
        import_hook.uninstall(CPU)
        undo()


@contextmanager
def cpu_emulation(force: bool = False) -> Iterator[None]:
    """CPU emulation inside a `with` block."""
    enable(force)
    try:
        yield
    finally:
        disable()


def _replace(undo: ExitStack, owner: Any, name: str, replacement: object) -> None:
    value = vars(owner).get(name, _ABSENT)
    undo.callback(delattr, owner, name) if value is _ABSENT else undo.callback(setattr, owner, name, value)
    setattr(owner, name, replacement)


def _replace_item(undo: ExitStack, mapping: MutableMapping[str, Any], key: str, replacement: object) -> None:
    value = mapping.get(key, _ABSENT)
    undo.callback(mapping.pop, key) if value is _ABSENT else undo.callback(mapping.__setitem__, key, value)
    mapping[key] = replacement


def _forbid_compilation(undo: ExitStack) -> None:
    """Compiling for the CPU takes minutes and a C++ compiler, for functions of a few lines."""
    _replace_item(undo, os.environ, "TORCHDYNAMO_DISABLE", "1")
    # The compiler reads the variable when it is imported.
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None:
        undo.callback(setattr, config, "disable", config.disable)
        config.disable = True


def _end_groups_at_exit(undo: ExitStack) -> None:
    """Stock scripts leave their process groups to the interpreter's end, which gloo's threads don't always survive."""
    import torch.distributed as dist

    def end_groups() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    atexit.register(end_groups)
    undo.callback(atexit.unregister, end_groups)


def _add_log_filter(undo: ExitStack, logger: str, log_filter: logging.Filter) -> None:
    logging.getLogger(logger).addFilter(log_filter)
    undo.callback(logging.getLogger(logger).removeFilter, log_filter)


def _announce(count: int) -> None:
    if import_hook.on_first_rank():
        flags = " ".join(flag for flag, _, _ in DEFAULTS)
        sys.stderr.write(
            f"megatron_fsdp_v2: CPU emulation is on: {count} stand-ins for CUDA, {' and '.join(BLOCKED_PACKAGES)} "
            "hidden, no compilation; times and memory figures say nothing about a GPU\n"
            f"megatron_fsdp_v2: CPU emulation changes the defaults of Megatron's flags to: {flags}\n"
        )
