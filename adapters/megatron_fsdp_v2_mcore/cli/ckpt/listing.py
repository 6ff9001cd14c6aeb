"""`mfsdp2 ckpt list`: the keys of a checkpoint, what they are and where."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .session import ERROR, PATTERN_HELP, AsJson, CheckpointPath, session
from .text import counted, dtype_name, print_columns, print_json, size_text

if TYPE_CHECKING:
    from megatron_fsdp_v2.checkpoint.inspector import Checkpoint, Entry


def list_keys(
    path: CheckpointPath,
    pattern: Annotated[str | None, typer.Option("--filter", metavar="GLOB", help=PATTERN_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """List keys with kind, dtype, shape, number of chunks and files, and bytes in files (headers included).

    Reads .metadata alone, so it is quick, and checks that the files are there and long enough and that the chunks of
    every tensor fill it; problems go to standard error and make the exit code 2.
    """
    with session() as is_first:
        from megatron_fsdp_v2.checkpoint.inspector import open_checkpoint, problems_of

        checkpoint = open_checkpoint(path)
        entries = checkpoint.select(pattern) if pattern is None else checkpoint.select_some(pattern)
        problems = problems_of(checkpoint.path, entries)
        if is_first and as_json:
            print_json(_as_json(checkpoint, entries, problems))
        elif is_first:
            _print(checkpoint, entries)
        if is_first and problems:
            typer.echo("\n".join(["", "problems:", *[f"  {problem}" for problem in problems]]), err=True)
    if problems:
        raise typer.Exit(ERROR)


def totals_of(entries: "list[Entry]") -> dict[str, int]:
    """Numbers of tensors, objects, elements, files and bytes in files."""
    return {
        "tensors": sum(entry.kind == "tensor" for entry in entries),
        "objects": sum(entry.kind == "object" for entry in entries),
        "elements": sum(entry.numel for entry in entries),
        "bytes": sum(entry.length for entry in entries),
        "files": len({file for entry in entries for file in entry.files}),
    }


def chunks_as_json(entry: "Entry") -> list[dict[str, Any]]:
    """Where the parts of an entry are; an object has one part without a box."""
    is_tensor = entry.kind == "tensor"
    return [
        {
            "offsets": chunk.box.offsets if is_tensor else None,
            "sizes": chunk.box.sizes if is_tensor else None,
            "file": chunk.file,
            "offset_in_file": chunk.offset,
            "bytes": chunk.length,
        }
        for chunk in entry.chunks
    ]


def head_as_json(entry: "Entry") -> dict[str, Any]:
    """What an entry is, without where it is."""
    return {
        "key": entry.key,
        "kind": entry.kind,
        "dtype": None if entry.dtype is None else dtype_name(entry.dtype),
        "shape": entry.shape,
    }


def _as_json(checkpoint: "Checkpoint", entries: "list[Entry]", problems: list[str]) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "entries": [
            {**head_as_json(entry), "bytes": entry.length, "files": entry.files, "chunks": chunks_as_json(entry)}
            for entry in entries
        ],
        "totals": totals_of(entries),
        "other_files": checkpoint.other_files(),
        "problems": problems,
    }


def _print(checkpoint: "Checkpoint", entries: "list[Entry]") -> None:
    rows = [
        (
            entry.key,
            entry.kind,
            "" if entry.dtype is None else dtype_name(entry.dtype),
            "" if entry.shape is None else str(list(entry.shape)),
            len(entry.chunks),
            len(entry.files),
            entry.length,
        )
        for entry in entries
    ]
    print_columns(("key", "kind", "dtype", "shape", "chunks", "files", "bytes"), rows)
    totals = totals_of(entries)
    typer.echo(
        f"\n{counted(totals['tensors'], 'tensor')} with {counted(totals['elements'], 'element')}, "
        f"{counted(totals['objects'], 'object')}, {size_text(totals['bytes'])} in {counted(totals['files'], 'file')}"
    )
    if others := checkpoint.other_files():
        typer.echo(f"no part of any entry: {', '.join(others)}")
