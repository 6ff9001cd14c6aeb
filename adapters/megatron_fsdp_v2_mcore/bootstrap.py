"""What every Python start in an environment with this package pays for: read the command line, usually do nothing.

The `.pth` file beside the installed package calls `activate()` while the interpreter is still starting. Only `sys` and
`os` may be imported here before it's known that this process wants Megatron changed, and the file has to parse on
interpreters older than the package supports, so that they get a readable line.
"""

import os
import sys

FLAG = "--use-megatron-fsdp-v2"
ENV_DISABLE = "MEGATRON_FSDP_V2_DISABLE"
ENV_ACTIVE = "MEGATRON_FSDP_V2_ACTIVE"
ENV_CPU_EMULATION = "MEGATRON_FSDP_V2_CPU_EMULATION"
OLDEST_PYTHON = (3, 12)

_OFF_VALUES = ("", "0")


def switched_on(variable):
    """Whether an environment variable holds something else than "" or "0"."""
    return os.environ.get(variable, "") not in _OFF_VALUES


def asked_for_v2():
    """Whether this process, or the parent that started it, has the flag on its command line.

    `sys.argv` isn't set yet when `.pth` files run, and a spawned child has the command line of `multiprocessing`.
    """
    return FLAG in getattr(sys, "orig_argv", ()) or FLAG in getattr(sys, "argv", ()) or switched_on(ENV_ACTIVE)


def activate():
    """Install the import hook if this process asked for v2 or for CPU emulation; never raises."""
    if switched_on(ENV_DISABLE):
        return
    v2 = asked_for_v2()
    if not v2 and not switched_on(ENV_CPU_EMULATION):
        return
    try:
        if sys.version_info < OLDEST_PYTHON:
            raise RuntimeError(
                "Python %d.%d or newer is needed, this is %d.%d" % (OLDEST_PYTHON + tuple(sys.version_info[:2]))
            )
        from . import import_hook

        import_hook.install(v2=v2)
    except Exception as error:
        sys.stderr.write("megatron_fsdp_v2 is not active: %s\n" % (error,))
