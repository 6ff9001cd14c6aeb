"""Text and JSON for what the commands print. Lines are never cut, whatever the width of the terminal."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import typer


def print_columns(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table; numbers stand to the right."""
    rows = [list(row) for row in rows]
    texts = [list(header), *[[_text(cell) for cell in row] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [all([isinstance(row[column], int | float) for row in rows]) for column in range(len(header))]
    for line in texts:
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ]
        typer.echo("  ".join(cells).rstrip())


def print_json(value: Any) -> None:
    """One JSON object. Standard JSON has no infinities and no NaN; they become text."""
    typer.echo(json.dumps(_standard(value), indent=2, allow_nan=False))


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def size_text(size: int) -> str:
    """Bytes exactly and, if there are many, roughly."""
    from rich.filesize import decimal

    return f"{size:,} bytes" if size < 1000 else f"{size:,} bytes ({decimal(size)})"


def counted(number: int, noun: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _text(cell: Any) -> str:
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def _standard(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _standard(item) for key, item in value.items()}
    return [_standard(item) for item in value] if isinstance(value, list | tuple) else value
