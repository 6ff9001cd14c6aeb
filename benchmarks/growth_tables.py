"""How costs grow, as tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from .results import PLAIN, GrowthFigures, StartFigures
from .tables import markdown_table

PEER = "FSDP2"


def host_table(figures: Sequence[GrowthFigures]) -> Table:
    """Per point and variant: least microseconds per unit, and the wrapper's own beside FSDP2's and the first point's.

    The wrapper's own is what is left without the plain modules' time and what the simulated group spends.
    """
    columns = ["units", "ranks", "us per unit"]
    for name in ("forward", "backward"):
        columns += [f"{name}, least", "sending", "own", "to FSDP2's", "to first"]
    table = markdown_table(f"Host time per unit, {len(figures[0].forward)} interleaved rounds", columns)
    points = list(dict.fromkeys((row.units, row.ranks) for row in figures))
    first = {row.name: row for row in figures if (row.units, row.ranks) == points[0]}
    for point in points:
        here = {row.name: row for row in figures if (row.units, row.ranks) == point}
        for row in here.values():
            cells = [cell for index in (0, 1) for cell in _cells(row, here, first, index)]
            table.add_row(str(row.units), str(row.ranks), row.name, *cells)
    return table


def _cells(
    row: GrowthFigures, here: dict[str, GrowthFigures], first: dict[str, GrowthFigures], index: int
) -> list[str]:
    """Of the forward (0) or the backward (1)."""
    least = f"{_least(row, index):.0f}"
    if row.name == PLAIN:
        return [least, "", "", "", ""]
    own = _own(row, here, index)
    to_peer = "" if row.name == PEER else f"{own / _own(here[PEER], here, index):.2f}"
    to_first = f"{own / _own(first[row.name], first, index):.2f}"
    return [least, f"{_sending(row, index):.0f}", f"{own:.0f}", to_peer, to_first]


def _own(row: GrowthFigures, here: dict[str, GrowthFigures], index: int) -> float:
    return _least(row, index) - _least(here[PLAIN], index) - _sending(row, index)


def _sending(row: GrowthFigures, index: int) -> float:
    return min(row.backward_sending if index else row.forward_sending)


def _least(row: GrowthFigures, index: int) -> float:
    return min(row.backward if index else row.forward)


def start_table(figures: Sequence[StartFigures]) -> Table:
    """Seconds to wrap models of growing size, and microseconds per parameter tensor."""
    columns = ["", "layers", "parameters", "elements, 1e9", "seconds, least", "us per parameter"]
    table = markdown_table("Wrapping DeepSeek-V3 on 1024 simulated ranks", columns)
    for row in figures:
        least = min(row.seconds)
        table.add_row(
            row.name,
            str(row.layers),
            f"{row.parameters:,}",
            f"{row.elements / 1e9:.1f}",
            f"{least:.2f}",
            f"{least / row.parameters * 1e6:.0f}",
        )
    return table
