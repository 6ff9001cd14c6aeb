"""What all commands of `mfsdp2 ckpt` need: ranks, errors, options and a progress bar."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

ERROR = 2
_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_memory(text: str) -> int:
    """Bytes, given as a number with or without a unit: 500000, 64K, 512MiB, 1.5G. Units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no amount of memory; 512MiB is one")
    return int(float(match[1]) * 1024 ** _UNITS[match[2].upper()])


CheckpointPath = Annotated[Path, typer.Argument(metavar="PATH", help="Folder with the checkpoint's .metadata.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Memory = Annotated[
    int | None,
    typer.Option(
        parser=parse_memory,
        metavar="BYTES",
        help="Memory that each rank may use for reading, such as 512MiB; at least 64KiB. Larger tensors are read in "
        "parts. Default: 0.7 of what is free, divided by twice the ranks of this machine, at most 4GiB.",
    ),
]
PATTERN_HELP = "Only keys that match: * is any text (dots included), ? one character, [ab] one of several."


@contextlib.contextmanager
def session() -> Iterator[bool]:
    """Joins the other ranks of a torchrun; true on the one that prints. An error becomes a message and exit code 2."""
    import torch.distributed as dist

    from megatron_fsdp_v2.checkpoint.errors import CheckpointError

    joins = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    if joins:
        # One rank may read for long before the others hear of it. torchrun ends all when one dies.
        dist.init_process_group("gloo", timeout=timedelta(days=2))
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    try:
        yield is_first
    except (CheckpointError, ValueError) as error:
        if is_first:
            sys.stdout.flush()
            typer.echo(f"mfsdp2 ckpt: {error}", err=True)
        raise typer.Exit(ERROR) from None
    finally:
        if joins:
            dist.destroy_process_group()


@contextlib.contextmanager
def progress_bar(what: str, is_first: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error for the bytes that this rank reads; nothing if that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    shown = is_first and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
