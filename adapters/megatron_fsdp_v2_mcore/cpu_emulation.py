"""Stock Megatron on a machine without a GPU, over gloo.

Asked for by `MEGATRON_FSDP_V2_CPU_EMULATION=1` or `mfsdp2 run --cpu-emulation`, with or without v2. The stand-ins for
`torch.cuda` are in `cpu_stand_ins.py`, the changes inside Megatron are rows of the patch table. It shows that control
flow, collectives and numbers are right; stream order, memory and speed of a GPU can't be seen here.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import import_hook
from .bootstrap import ENV_CPU_EMULATION
from .patches import CPU

FORCE = "force"

# Their kernels run on CUDA only, and a half-installed copy ends the import of megatron.core.
BLOCKED_PACKAGES = ("transformer_engine", "apex")

_ABSENT = object()


class _Emulation:
    """What `enable` replaced, in order, so that `disable` can put it back."""

    def __init__(self) -> None:
        self.attributes: list[tuple[Any, str, object]] = []
        self.modules: dict[str, object] = {}
        self.environment: dict[str, str | None] = {}

    def replace(self, owner: Any, name: str, replacement: object) -> None:
        self.attributes.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, replacement)

    def block(self, package: str) -> None:
        self.modules[package] = sys.modules.get(package, _ABSENT)
        sys.modules[package] = None  # type: ignore[assignment]

    def set_environment(self, name: str, value: str) -> None:
        self.environment[name] = os.environ.get(name)
        os.environ[name] = value

    def restore(self) -> None:
        for owner, name, value in reversed(self.attributes):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        for package, module in self.modules.items():
            if module is _ABSENT:
                sys.modules.pop(package, None)
            else:
                sys.modules[package] = module  # type: ignore[assignment]
        for variable, text in self.environment.items():
            if text is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = text


_running: list[_Emulation] = []


def enabled() -> bool:
    """Whether the stand-ins are in place in this process."""
    return bool(_running)


def enable(force: bool = False) -> None:
    """Put the stand-ins in place, announce it on standard error of rank 0, and pass it on to child processes.

    Args:
        force: go ahead although there is a GPU; the environment variable's value `force` means the same.

    Raises:
        RuntimeError: a GPU is present and `force` wasn't given, or Megatron is imported already.
    """
    if _running:
        return
    import torch

    from .cpu_stand_ins import stand_ins

    force = force or os.environ.get(ENV_CPU_EMULATION) == FORCE
    if torch.cuda.is_available() and not force:
        raise RuntimeError(
            f"CPU emulation was asked for, but this machine has a GPU ({torch.cuda.get_device_name()}). "
            f"Hide it with CUDA_VISIBLE_DEVICES= (empty), or set {ENV_CPU_EMULATION}={FORCE}"
        )
    emulation = _Emulation()
    table = stand_ins()
    for stand_in in table:
        emulation.replace(stand_in.owner, stand_in.name, stand_in.make(getattr(stand_in.owner, stand_in.name, None)))
    for package in BLOCKED_PACKAGES:
        emulation.block(package)
    emulation.set_environment(ENV_CPU_EMULATION, FORCE if force else "1")
    # Compiling for the CPU takes minutes and a C++ compiler, for functions of a few lines.
    emulation.set_environment("TORCHDYNAMO_DISABLE", "1")
    _running.append(emulation)
    import_hook.install(cpu_emulation=True)
    _announce(len(table))


def disable() -> None:
    """Put everything back as it was before `enable`."""
    if _running:
        import_hook.uninstall(CPU)
        _running.pop().restore()


@contextmanager
def cpu_emulation(force: bool = False) -> Iterator[None]:
    """CPU emulation inside a `with` block."""
    enable(force)
    try:
        yield
    finally:
        disable()


def _announce(count: int) -> None:
    spawned = "multiprocessing.spawn" in sys.modules and sys.modules["multiprocessing"].parent_process() is not None
    if os.environ.get("RANK", "0") == "0" and not spawned:
        sys.stderr.write(
            f"megatron_fsdp_v2: CPU emulation is on: {count} stand-ins for CUDA, {' and '.join(BLOCKED_PACKAGES)} "
            "hidden, no compilation; times and memory figures say nothing about a GPU\n"
        )
