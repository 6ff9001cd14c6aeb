"""`mfsdp2 explain`: what a training run would hold and send, without a step of it."""

import os
from pathlib import Path
from typing import Annotated

import typer

from .. import bootstrap, explanation, import_hook
from .run import enable_emulation, run_as_main, start_ranks


def explain(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", exists=True, dir_okay=False, help="The training script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS...", help="Everything after the script goes to it.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list, one object per model chunk, instead of tables.")
    ] = False,
    emulate: Annotated[
        bool, typer.Option("--cpu-emulation", help="Build the model on the CPU over gloo, without a GPU.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --cpu-emulation: go ahead although this machine has a GPU.")
    ] = False,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, help="Ranks to start with torchrun. Default: 1, or none under a torchrun."),
    ] = None,
) -> None:
    """Explain the units, memory and collectives of a Megatron run instead of training.

    The script runs until model and optimizer are built as training would, a checkpoint to load included. Then rank 0
    prints, and all ranks end with exit code 0. --use-megatron-fsdp-v2 is added to the script's arguments if it isn't
    there. Standard output has the explanation alone: what the script prints goes to standard error.

    All ranks of this machine: mfsdp2 explain --nproc 2 SCRIPT ARGS... 2>/dev/null

    One rank of several: torchrun --nproc-per-node 2 --no-python mfsdp2 explain SCRIPT ARGS...
    """
    passed_on = arguments or []
    if bootstrap.FLAG not in passed_on:
        passed_on = [*passed_on, bootstrap.FLAG]
    if force and not emulate:
        raise typer.BadParameter("--force belongs to --cpu-emulation")
    if bootstrap.switched_on(bootstrap.ENV_DISABLE):
        typer.echo(f"nothing to explain: {bootstrap.ENV_DISABLE} switches megatron_fsdp_v2 off", err=True)
        raise typer.Exit(1)
    if nproc is None and "RANK" not in os.environ:
        nproc = 1
    if nproc is not None:
        chosen = {"--json": as_json, "--cpu-emulation": emulate, "--force": force}
        options = [option for option, is_on in chosen.items() if is_on]
        start_ranks(nproc, ["explain", *options, str(script), *passed_on])
    import_hook.install_explanation(explanation.keep_standard_output(), as_json)
    if emulate:
        enable_emulation(force)
    run_as_main(script, passed_on)
    typer.echo(f"{script} ended before Megatron's training loop built a model, so nothing was explained", err=True)
    raise typer.Exit(1)
