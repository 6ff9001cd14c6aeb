"""What every Python start in an environment with this package pays for: read the command line, usually do nothing.

The `.pth` file beside the installed package calls `activate()` while the interpreter is still starting. Only `sys` and
`os` may be imported here before it's known that this process wants Megatron changed, and the file has to parse on
interpreters older than the package supports, so that they get a readable line.
"""

from __future__ import annotations

import os
import sys

FLAG = "--use-megatron-fsdp-v2"
ENV_DISABLE = "MEGATRON_FSDP_V2_DISABLE"
ENV_ACTIVE = "MEGATRON_FSDP_V2_ACTIVE"
ENV_CPU_EMULATION = "MEGATRON_FSDP_V2_CPU_EMULATION"
OLDEST_PYTHON = (3, 12)

_OFF_VALUES = ("", "0")


def switched_on(variable: str) -> bool:
    """Whether an environment variable holds something else than "" or "0"."""
    return os.environ.get(variable, "") not in _OFF_VALUES


def asked_for_v2() -> bool:
    """Whether this process, or the parent that started it, has the flag on its command line.

    `sys.argv` isn't set yet when `.pth` files run, and a spawned child has the command line of `multiprocessing`.
    """
    return FLAG in getattr(sys, "orig_argv", ()) or FLAG in getattr(sys, "argv", ()) or switched_on(ENV_ACTIVE)


def python_problem() -> str | None:
    """Why this interpreter is too old, or None."""
    if sys.version_info >= OLDEST_PYTHON:
        return None
    major, minor = OLDEST_PYTHON
    return f"Python {major}.{minor} or newer is needed, this is {sys.version_info[0]}.{sys.version_info[1]}"


def activate() -> None:
    """Install the import hook if this process asked for v2 or for CPU emulation; never raises."""
    if switched_on(ENV_DISABLE):
        return
    v2 = asked_for_v2()
    if not v2 and not switched_on(ENV_CPU_EMULATION):
        return
    try:
        problem = python_problem()
        if problem:
            raise RuntimeError(problem)
        from . import import_hook

        import_hook.install(v2=v2)
    except Exception as error:
        sys.stderr.write(f"megatron_fsdp_v2 is not active: {error}\n")
