"""What checkpoints cost, as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from .results import PreparationFigures, StorageResult
from .tables import MIB, markdown_table

# What is required of the median save and load against plain DCP's.
TIME_LIMIT = 1.15


def storage_table(result: StorageResult) -> Table:
    """Milliseconds to save and to load of every side, and the ratios of medians to the first side's."""
    columns = ["", "save ms, least", "median", "ratio of medians", "load ms, least", "median", "ratio of medians"]
    rounds = len(result.sides[0].save)
    table = markdown_table(f"{result.state_bytes / MIB:.0f} MiB on two ranks, {rounds} interleaved rounds", columns)
    peer = result.sides[0]
    for side in result.sides:
        cells = []
        for mine, theirs in ((side.save, peer.save), (side.load, peer.load)):
            ratio = "" if side is peer else f"{median(mine) / median(theirs):.2f}"
            cells += [f"{min(mine) * 1e3:.0f}", f"{median(mine) * 1e3:.0f}", ratio]
        table.add_row(side.name, *cells)
    return table


def requirements(result: StorageResult) -> list[tuple[str, bool]]:
    """Each ratio of medians to plain DCP's, and whether it is within the limit."""
    peer, mine = result.sides
    found = []
    for name, ratio in (
        ("save", median(mine.save) / median(peer.save)),
        ("load", median(mine.load) / median(peer.load)),
    ):
        found.append((f"{name} {ratio:.2f} of plain DCP's: at most {TIME_LIMIT}", ratio <= TIME_LIMIT))
    return found


def preparation_table(figures: Sequence[PreparationFigures]) -> Table:
    """Seconds to prepare models of growing size, microseconds per key, and those beside the first model's."""
    columns = ["layers", "keys", "seconds, least", "us per key", "to first"]
    table = markdown_table("Preparing DeepSeek-V3 and AdamW's state on one of 256 simulated ranks", columns)
    per_key = [min(row.seconds) / row.keys for row in figures]
    for row, cost in zip(figures, per_key, strict=True):
        cells = (f"{row.keys:,}", f"{min(row.seconds):.2f}", f"{cost * 1e6:.0f}", f"{cost / per_key[0]:.2f}")
        table.add_row(str(row.layers), *cells)
    return table
