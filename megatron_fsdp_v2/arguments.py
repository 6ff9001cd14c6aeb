"""Checks of plain arguments."""

from __future__ import annotations

import math


def check_positive(name: str, value: object) -> None:
    """Refuse what isn't a positive, finite number.

    Raises:
        TypeError: the value isn't an int or float.
        ValueError: it is zero, negative, infinite or not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
