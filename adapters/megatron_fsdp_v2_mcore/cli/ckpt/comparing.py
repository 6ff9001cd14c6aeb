"""`mfsdp2 ckpt compare`: what two checkpoints have in common."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .session import PATTERN_HELP, AsJson, Memory, progress_bar, session
from .text import counted, print_columns, print_json

if TYPE_CHECKING:
    from megatron_fsdp_v2.checkpoint.inspector import Comparison

DIFFERENT = 1


def compare_checkpoints(
    a: Annotated[Path, typer.Argument(metavar="A", help="Folder with the first checkpoint's .metadata.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Folder with the second one's.")],
    atol: Annotated[float, typer.Option(help="Absolute tolerance.")] = 0.0,
    rtol: Annotated[float, typer.Option(help="Tolerance relative to B.")] = 0.0,
    pattern: Annotated[
        str | None, typer.Option("--filter", metavar="GLOB", help=f"{PATTERN_HELP} Without the stripped prefix.")
    ] = None,
    strip_prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Take this off keys of both that begin with it, such as 'module.'.")
    ] = "",
    as_json: AsJson = False,
    memory: Memory = None,
) -> None:
    """Compare two checkpoints key by key. Exit code 0: equal, 1: different, 2: an error.

    Values differ where |a - b| > atol + rtol * |b|; NaN equals NaN and nothing else, infinities of one sign are equal.
    The relative difference is |a - b| / max(|a|, |b|), L2 is the norm of a - b in float64; where either is NaN they say
    nothing. Another shape or dtype is a difference; values of equal shapes are compared nevertheless. Objects are
    compared by the SHA-256 of their bytes, all of them. Files that belong to no key aren't compared.
    """
    with session() as is_first:
        from megatron_fsdp_v2.checkpoint.inspector import compare, open_checkpoint

        first, second = open_checkpoint(a), open_checkpoint(b)
        with progress_bar("comparing", is_first) as progress:
            found = compare(
                first,
                second,
                pattern=pattern,
                strip_prefix=strip_prefix,
                atol=atol,
                rtol=rtol,
                memory=memory,
                progress=progress,
            )
        if is_first and as_json:
            print_json({"a": str(a), "b": str(b), "atol": atol, "rtol": rtol, **_as_json(found)})
        elif is_first:
            _print(found)
    if not found.is_equal:
        raise typer.Exit(DIFFERENT)


def _as_json(found: "Comparison") -> dict[str, Any]:
    return {
        "equal": found.is_equal,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "unlike": {key: {"a": of_a, "b": of_b} for key, (of_a, of_b) in found.unlike.items()},
        "different": found.different,
        "tensors": {key: asdict(difference) for key, difference in found.differences.items()},
        "objects": {key: {"same_bytes": same} for key, same in found.objects.items()},
    }


def _print(found: "Comparison") -> None:
    for title, keys in (("only in A", found.only_a), ("only in B", found.only_b)):
        if keys:
            typer.echo("\n".join([f"{title}:", *[f"  {key}" for key in keys], ""]))
    if found.unlike:
        print_columns(("of another kind, dtype or shape", "A", "B"), [(k, *ab) for k, ab in found.unlike.items()])
        typer.echo("")
    rows = [
        (key, seen.differing, seen.elements, seen.max_abs, seen.max_rel, seen.l2, seen.nan_on_one_side)
        for key in found.different
        if (seen := found.differences.get(key)) is not None
    ]
    if rows:
        header = ("values differ", "differing", "elements", "max abs", "max rel", "L2", "NaN on one side")
        print_columns(header, rows)
        typer.echo("")
    if objects := [key for key, same in found.objects.items() if not same]:
        typer.echo("\n".join(["objects with other bytes:", *[f"  {key}" for key in objects], ""]))
    compared = f"{counted(len(found.differences), 'tensor')} and {counted(len(found.objects), 'object')} compared"
    typer.echo(f"{compared}: {'equal' if found.is_equal else 'different'}")
