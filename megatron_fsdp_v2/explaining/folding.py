"""Puts units that differ by a number in their path alone into one row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .plan import UnitPlan

# Beyond this many runs of numbers a label names the first and the last alone.
_MOST_RUNS = 4


@dataclass(frozen=True)
class Row:
    """Units that are alike; ``label`` names them all, ``unit`` is the first."""

    label: str
    unit: UnitPlan
    count: int


def fold(units: Sequence[UnitPlan]) -> list[Row]:
    """One row per kind of unit, in order of first appearance.

    Alike are units whose paths have the same names with numbers at the same places, and that agree in all else.
    """
    alike: dict[str, list[UnitPlan]] = {}
    for unit in units:
        names = tuple(re.sub(r"\d+", "*", path) for path in unit.paths)
        # Plans hold dicts, so they aren't hashable; what they show is the same where they are equal.
        alike.setdefault(repr(replace(unit, paths=names)), []).append(unit)
    return [Row(_label([unit.paths for unit in members]), members[0], len(members)) for members in alike.values()]


def _label(paths: Sequence[tuple[str, ...]]) -> str:
    if len(paths) == 1:
        return _joined(paths[0])
    # Paths as pieces, every second of them a number.
    split = [re.split(r"(\d+)", _joined(path)) for path in paths]
    varying = [place for place in range(len(split[0])) if len({pieces[place] for pieces in split}) > 1]
    if len(varying) > 1:
        label = f"{_joined(paths[0])} ... {_joined(paths[-1])}"
    else:
        place = varying[0]
        numbers = _ranges([int(pieces[place]) for pieces in split])
        label = "".join([*split[0][:place], numbers, *split[0][place + 1 :]])
    return f"{label} ({len(paths)} units)"


def _joined(paths: tuple[str, ...]) -> str:
    return ", ".join(path or "(root)" for path in paths)


def _ranges(numbers: Sequence[int]) -> str:
    """``0-2,5`` for 0, 1, 2, 5."""
    runs = list(_runs(sorted(numbers)))
    if len(runs) > _MOST_RUNS:
        runs = [runs[0], runs[1], "...", runs[-1]]
    return ",".join(runs)


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            first, last = numbers[start], numbers[index - 1]
            yield str(first) if first == last else f"{first}-{last}"
            start = index
