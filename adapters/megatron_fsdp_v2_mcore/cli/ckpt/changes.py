"""`mfsdp2 ckpt rename` and `remove`: other keys, fewer keys."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from .session import CheckpointPath, session
from .text import counted, size_text

if TYPE_CHECKING:
    from megatron_fsdp_v2.checkpoint.inspector import Change, Checkpoint

Apply = Annotated[bool, typer.Option("--apply", help="Do it. Without this, only say what would be done.")]


def rename(
    path: CheckpointPath,
    old: Annotated[str, typer.Argument(metavar="OLD", help="A key, or keys with *, which is any text.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new key, with as many * as OLD.")],
    apply: Apply = False,
) -> None:
    """Rename keys; a dry run unless --apply is given.

    mfsdp2 ckpt rename PATH 'module.*' '*' --apply

    Each * of NEW becomes what the * of OLD at the same place matched. Only .metadata is written, in one step. Refused
    is what would give two entries one key, or could not be loaded any more.
    """

    def plan(checkpoint: "Checkpoint") -> "Change":
        from megatron_fsdp_v2.checkpoint.inspector import plan_rename

        return plan_rename(checkpoint, old, new)

    _change(path, plan, apply, "renamed")


def remove(
    path: CheckpointPath,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys, or patterns as for list --filter.")],
    apply: Apply = False,
) -> None:
    """Remove keys; a dry run unless --apply is given.

    .metadata is written in one step. Space is freed only where a file holds nothing of any other key; such files are
    deleted, others stay as they are.
    """

    def plan(checkpoint: "Checkpoint") -> "Change":
        from megatron_fsdp_v2.checkpoint.inspector import plan_removal

        return plan_removal(checkpoint, keys)

    _change(path, plan, apply, "removed")


def _change(path: CheckpointPath, plan: "Callable[[Checkpoint], Change]", apply: bool, done: str) -> None:
    with session() as is_first:
        from megatron_fsdp_v2.checkpoint.inspector import apply_change, open_checkpoint

        change = plan(open_checkpoint(path))
        if is_first:
            _print(change)
        if apply:
            apply_change(change)
        if is_first:
            count = counted(len(change.keys), "key")
            typer.echo(f"{count} {done}" if apply else f"{count} to be {done}; a dry run, so nothing was: add --apply")


def _print(change: "Change") -> None:
    for old, new in change.keys.items():
        typer.echo(old if new is None else f"{old} -> {new}")
    if change.files:
        typer.echo(f"files that nothing else needs: {', '.join(change.files)}, {size_text(change.freed)}")
    if change.kept:
        typer.echo(f"{size_text(change.kept)} stay in files that hold other keys; no space is freed for them")
