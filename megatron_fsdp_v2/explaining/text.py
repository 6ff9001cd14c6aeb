"""A plan as tables: by rich where it's installed, aligned with spaces elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from .folding import Row, fold
from .plan import Collective, GroupPlan, Plan, UnitPlan, joined

# Files and pipes have no width of their own.
_WIDTH = 180
_SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}
_LETTERS = {"replicated": "R", "sharded": "S", "partial": "P"}
_NOTES = """\
Placements are of compute weights / main weights / main gradients: S sharded, R replicated, along the shard axis, then
the outer one. Dtypes are of compute weights / main weights / main gradients / gradients while they are sent.
Bytes are one rank's and one unit's, padding included. A step has one micro-batch; weights were written before it."""


@dataclass(frozen=True)
class Table:
    """Text cells below their headings; columns whose index is in ``numeric`` are aligned to the right."""

    title: str
    headings: Sequence[str]
    numeric: frozenset[int]
    rows: Sequence[Sequence[str]]


def write(plan: Plan, file: TextIO) -> None:
    """Print the tables of a plan, its totals, and how to read them."""
    rows = fold(plan.units)
    tables = [_held_table(plan, rows), _sent_table(rows)]
    closing = "\n".join([*_totals(plan), "", _NOTES])
    try:
        # The core needs torch alone.
        from rich import box, console, table
    except ImportError:
        for plain in tables:
            file.write(_aligned(plain) + "\n\n")
        file.write(closing + "\n")
        return
    out = console.Console(file=file)
    if not out.is_terminal:
        out = console.Console(file=file, width=_WIDTH)
    for plain in tables:
        shown = table.Table(title=plain.title, title_justify="left", box=box.SIMPLE_HEAD)
        for index, heading in enumerate(plain.headings):
            shown.add_column(heading, justify="right" if index in plain.numeric else "left", overflow="fold")
        for cells in plain.rows:
            shown.add_row(*cells)
        out.print(shown, markup=False)
    out.print(closing, markup=False, highlight=False, soft_wrap=True)


def _held_table(plan: Plan, rows: Sequence[Row]) -> Table:
    headings = (
        "unit", "module", "parameters", "elements", "padding", "segments", "dtypes", "placements",
        "compute", "main", "gradients", "gathered",
    )  # fmt: skip
    title = f"{plan.module}: {plan.totals.units} units, {plan.totals.elements:,} elements"
    cells = [line for row in rows for line in _held_rows(row)]
    return Table(title, headings, frozenset({2, 3, 4, 5, 8, 9, 10, 11}), cells)


def _held_rows(row: Row) -> Iterator[list[str]]:
    names = [row.label, ", ".join(dict.fromkeys(row.unit.modules))]
    for group in row.unit.groups or ():
        held = group.bytes
        yield [
            *names,
            f"{group.parameters}{'' if group.trainable else ' frozen'}",
            f"{group.elements:,}",
            f"{group.padding_percent:.2f} %",
            str(group.segments),
            " / ".join(_SHORT.get(dtype, dtype) for dtype in group.dtypes.values()),
            " / ".join(_letters(placed) for placed in group.placements.values()) + _where(row.unit, group),
            *(_size(size) for size in (held.compute_weights, held.main_weights, held.main_gradients)),
            _size(held.gathered_weights),
        ]
        names = ["", ""]
    if not row.unit.groups:
        yield [*names, "0", *[""] * 9]


def _letters(placed: dict[str, str]) -> str:
    return "".join(_LETTERS[placement] for placement in placed.values())


def _where(unit: UnitPlan, group: GroupPlan) -> str:
    return "" if group.main_device == unit.device else f", main on {group.main_device}"


def _sent_table(rows: Sequence[Row]) -> Table:
    headings = ("unit", "ranks", "reshard after forward", "sent in forward", "sent in backward")
    cells = [
        [
            row.label,
            " x ".join(f"{ranks} {axis}" for axis, ranks in row.unit.mesh.items()),
            _reshard(row.unit),
            *(_calls(row.unit.collectives, phase, row.unit.mesh) for phase in ("forward", "backward")),
        ]
        for row in rows
    ]
    return Table("Collectives of a step", headings, frozenset(), cells)


def _reshard(unit: UnitPlan) -> str:
    if not any(group.bytes.gathered_weights for group in unit.groups):
        return "keeps weights whole" if unit.groups else ""
    if not unit.has_backward:
        return "yes, no backward"
    reshard = unit.reshard_after_forward
    if isinstance(reshard, bool):
        return "yes" if reshard else "no"
    kept = _size(unit.bytes.kept_weights)
    return f"among {reshard}, keeping {kept}"


def _calls(collectives: Sequence[Collective], phase: str, mesh: dict[str, int]) -> str:
    parts = [
        f"{one.calls} {one.kind}{'' if one.axis == 'shard' and len(mesh) == 1 else f' ({one.axis})'} {_size(one.bytes)}"
        for one in joined(collectives)
        if one.phase == phase
    ]
    return ", ".join(parts)


def _totals(plan: Plan) -> list[str]:
    totals = plan.totals
    at_rest = totals.compute_weights + totals.main_weights + totals.main_gradients
    padding = 100 * totals.padding / max(totals.elements, 1)
    lines = [
        f"A rank holds {_size(at_rest)}: compute weights {_size(totals.compute_weights)}, main weights "
        f"{_size(totals.main_weights)}, main gradients {_size(totals.main_gradients)}; padding adds {padding:.2f} % to "
        "the parameters.",
    ]
    if totals.largest_gathered_unit:
        lines.append(f"The largest unit gathers {_size(totals.largest_gathered_unit)} more while it computes.")
    axes = {one.axis: 0 for one in totals.collectives}
    for phase in ("forward", "backward"):
        sent = _calls(totals.collectives, phase, axes)
        lines.append(f"A step sends in {phase}: {sent or 'nothing'}.")
    return lines


def _aligned(table: Table) -> str:
    lines = [list(table.headings), *map(list, table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.headings))]
    text = [table.title]
    for line in lines:
        cells = [
            cell.rjust(width) if column in table.numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _size(size: int) -> str:
    """Bytes in the largest unit that leaves at least one."""
    if not size:
        return "0"
    amount, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
