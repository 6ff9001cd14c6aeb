"""Learns in which order units run, to predict the next one."""

from __future__ import annotations

from collections.abc import Iterable

from .unit import Unit


class OrderRecorder:
    """Records one pass after another and predicts from the last complete one."""

    def __init__(self) -> None:
        self.previous: list[Unit] = []
        # Whether a pass was recorded, rather than supposed.
        self.is_known = False
        self._current: list[Unit] = []
        self._cursor = 0

    def begin(self) -> None:
        """Start a pass, forgetting an unfinished one."""
        self._current = []
        self._cursor = 0

    def note(self, unit: Unit) -> Unit | None:
        """Record that ``unit`` runs now; return the unit that ran next the last time, if that is known."""
        self._current.append(unit)
        previous = self.previous
        if self._cursor >= len(previous) or previous[self._cursor] is not unit:
            # Another branch than last time: find the place again, or predict nothing.
            if unit not in previous[self._cursor :]:
                return None
            self._cursor = previous.index(unit, self._cursor)
        self._cursor += 1
        return previous[self._cursor] if self._cursor < len(previous) else None

    def commit(self) -> None:
        """End a pass: the next one is predicted from it."""
        if self._current:
            self.previous = self._current
            self.is_known = True
        self.begin()

    def suppose(self, units: Iterable[Unit]) -> None:
        """Predict from this order until a pass has been recorded."""
        if not self.previous:
            self.previous = list(units)
