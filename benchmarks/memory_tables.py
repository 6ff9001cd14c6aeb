"""Peak memory, as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .results import MEMORY_KINDS, MemoryResult
from .tables import MIB, markdown_table


def kinds_table(result: MemoryResult) -> Table:
    """Where the bytes are at the peak of every variant on one shape."""
    title = f"{result.shape}: MiB at the peak; P = {result.parameter_bytes / MIB:.1f} MiB of fp32 parameters"
    table = markdown_table(title, ["", *MEMORY_KINDS, "peak", "to peer"])
    for figures in result.variants:
        peer = result.of(figures.peer) if figures.peer else None
        cells = [f"{figures.kinds[kind] / MIB:.1f}" for kind in MEMORY_KINDS]
        ratio = f"{figures.peak / peer.peak:.3f}" if peer else ""
        table.add_row(figures.name, *cells, f"{figures.peak / MIB:.1f}", ratio)
    return table


def units_table(results: Sequence[MemoryResult]) -> Table:
    """The peaks of our variants beside what their units come to, and beside the peer's."""
    columns = ["", "", "peak", "to peer", "above state", "to peer", "sum", "peak / sum", "+ in flight", "peak / that"]
    table = markdown_table("MiB; sum: state, activations, root, two units, one gradient", columns)
    for result in results:
        for figures in result.variants:
            if figures.peer is None:
                continue
            peer, least, usual = result.of(figures.peer), figures.needed(False), figures.needed(True)
            table.add_row(
                result.shape,
                figures.name,
                f"{figures.peak / MIB:.1f}",
                f"{figures.peak / peer.peak:.3f}",
                f"{figures.above_state / MIB:.1f}",
                f"{figures.above_state / peer.above_state:.3f}",
                f"{least / MIB:.1f}",
                f"{figures.peak / least:.3f}",
                f"{usual / MIB:.1f}",
                f"{figures.peak / usual:.3f}",
            )
    return table
