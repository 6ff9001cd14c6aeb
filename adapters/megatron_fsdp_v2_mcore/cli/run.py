"""`mfsdp2 run`: an unedited training script, with the activation done here instead of at interpreter start."""

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from .. import bootstrap, cpu_emulation, import_hook

INTERRUPTED = 130


def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", exists=True, dir_okay=False, help="The training script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS...", help="Everything after the script goes to it untouched.")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--cpu-emulation", help="Run on the CPU over gloo, without a GPU; says so in the log.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --cpu-emulation: go ahead although this machine has a GPU.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Start this many ranks with torchrun on this machine.")
    ] = None,
) -> None:
    """Run a stock Megatron training script; --use-megatron-fsdp-v2 among its arguments is understood.

    One rank of several: torchrun --nproc-per-node 2 --no-python mfsdp2 run SCRIPT ARGS...

    All ranks of this machine: mfsdp2 run --nproc 2 SCRIPT ARGS...
    """
    passed_on = arguments or []
    if force and not emulate:
        raise typer.BadParameter("--force belongs to --cpu-emulation")
    if nproc is not None:
        options = [*(["--cpu-emulation"] if emulate else []), *(["--force"] if force else [])]
        start_ranks(nproc, ["run", *options, str(script), *passed_on])
    if emulate:
        enable_emulation(force)
    if bootstrap.FLAG in passed_on:
        _activate()
    run_as_main(script, passed_on)


def start_ranks(nproc: int, arguments: list[str]) -> NoReturn:
    """Become torchrun with ranks that are this command with other arguments.

    So signals reach torchrun, and nothing has to be passed on or cleaned up here.
    """
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "--no-python"]
    rank = [sys.executable, "-m", "megatron_fsdp_v2_mcore.cli", *arguments]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command, *rank])


def enable_emulation(force: bool) -> None:
    """Stand in for CUDA, or end this process with the reason why not."""
    try:
        cpu_emulation.enable(force)
    except RuntimeError as error:
        import_hook.refuse([str(error)])


def _activate() -> None:
    if bootstrap.switched_on(bootstrap.ENV_DISABLE):
        typer.echo(f"megatron_fsdp_v2 is not active: {bootstrap.ENV_DISABLE} is set", err=True)
    else:
        import_hook.install(v2=True)


def run_as_main(script: Path, arguments: list[str]) -> None:
    """Run the script as `python SCRIPT ARGS...` would: same `sys.argv`, same first entry of `sys.path`."""
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
