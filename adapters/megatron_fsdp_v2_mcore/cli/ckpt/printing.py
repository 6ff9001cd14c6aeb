"""`mfsdp2 ckpt print`: figures and some values of chosen keys."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .listing import chunks_as_json, head_as_json
from .session import AsJson, CheckpointPath, Memory, progress_bar, session
from .text import dtype_name, print_json, size_text

if TYPE_CHECKING:
    from megatron_fsdp_v2.checkpoint.inspector import Checkpoint, Entry, Summary


def print_keys(
    path: CheckpointPath,
    key: Annotated[str, typer.Argument(metavar="KEY", help="A key, or a pattern of keys as for list --filter.")],
    part: Annotated[
        str | None,
        typer.Option(
            "--slice",
            metavar="SLICE",
            help='Values to show, such as "0:2,:4": a range or an index for each dimension, all of those not named. '
            "Default: the first few.",
        ),
    ] = None,
    as_json: AsJson = False,
    memory: Memory = None,
) -> None:
    """Print chunks with files, L2 norm, minimum, maximum, numbers of NaN and infinities, and some values.

    The norm is taken in float64; NaN is left out of norm, minimum and maximum. Objects are shown if they can be read
    without running code from the checkpoint, and always with the SHA-256 of their bytes.
    """
    with session() as is_first:
        from megatron_fsdp_v2.checkpoint.inspector import open_checkpoint, summarize

        checkpoint = open_checkpoint(path)
        entries = checkpoint.select_some(key)
        with progress_bar("reading", is_first) as progress:
            summaries = summarize(checkpoint, entries, memory=memory, progress=progress)
        shown = [_shown(checkpoint, entry, summaries.get(entry.key), part) for entry in entries]
        if is_first and as_json:
            print_json({"path": str(checkpoint.path), "entries": shown})
        elif is_first:
            typer.echo("\n\n".join(_text(entry, figures) for entry, figures in zip(entries, shown, strict=True)))


def _shown(checkpoint: "Checkpoint", entry: "Entry", summary: "Summary | None", part: str | None) -> dict[str, Any]:
    from megatron_fsdp_v2.checkpoint.inspector import preview, show_object

    head = {**head_as_json(entry), "chunks": chunks_as_json(entry)}
    if summary is None:
        return {**head, **asdict(show_object(checkpoint, entry))}
    seen = preview(checkpoint, entry, part)
    return {**head, **asdict(summary), "slice": seen.part, "values": seen.values}


def _text(entry: "Entry", shown: dict[str, Any]) -> str:
    lines = [entry.key]
    if entry.dtype is not None:
        lines.append(f"  {dtype_name(entry.dtype)} {list(entry.shape or ())}, {entry.numel:,} elements")
    for chunk in entry.chunks:
        box = f"{list(chunk.box.sizes)} at {list(chunk.box.offsets)}: " if entry.dtype is not None else ""
        lines.append(f"  {box}{size_text(chunk.length)} in {chunk.file or 'no file'}")
    if entry.dtype is None:
        lines.append(f"  sha256 {shown['sha256']}")
        lines.append(f"  {shown['value']}" if shown["unreadable"] is None else f"  not shown: {shown['unreadable']}")
        return "\n".join(lines)
    extremes = "" if shown["minimum"] is None else f", min {shown['minimum']:.8g}, max {shown['maximum']:.8g}"
    lines.append(f"  L2 {shown['l2']:.8g}{extremes}, NaN {shown['nan']:,}, infinite {shown['infinite']:,}")
    lines.append(f"  [{shown['slice']}]:")
    return "\n".join([*lines, *_value_lines(shown["values"], "    ")])


def _value_lines(values: Any, indent: str) -> list[str]:
    """Nested lists, one innermost list per line."""
    if not isinstance(values, list) or not any([isinstance(value, list) for value in values]):
        row = values if isinstance(values, list) else [values]
        return [indent + "  ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in row)]
    return [line for value in values for line in _value_lines(value, indent)]
