"""Checks of plain arguments."""

from __future__ import annotations

import math
import warnings


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


def is_torchs(policy: object, name: str) -> bool:
    """Whether ``policy`` is an object of FSDP2's class ``name``, told without importing FSDP2."""
    kind = type(policy)
    return kind.__name__ == name and kind.__module__.startswith("torch.distributed.fsdp")


def check_flag(name: str, value: object) -> None:
    """Refuse what isn't a bool.

    Raises:
        TypeError: the value isn't a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")


def check_reduction(grad_reduction: object, grad_divisor: object) -> None:
    """Refuse what can't be reduced by.

    Raises:
        TypeError: the divisor isn't a number.
        ValueError: an unknown reduction, or a divisor that isn't positive and finite.
    """
    if grad_reduction not in ("average", "sum"):
        raise ValueError(f"grad_reduction must be 'average' or 'sum', got {grad_reduction!r}")
    check_positive("grad_divisor", grad_divisor)


def check_reshard(reshard_after_forward: object, shard_size: int) -> bool | int | None:
    """What ``reshard_after_forward`` asks for on a shard axis of ``shard_size`` ranks: a group size, a bool or None.

    Raises:
        ValueError: it isn't a bool, None, or a number of ranks that divides the shard axis.
    """
    value = reshard_after_forward
    if value is None or isinstance(value, bool):
        return value
    if not isinstance(value, int) or value < 1 or shard_size % value:
        raise ValueError(
            f"reshard_after_forward must be True, False, None or a number of ranks that divides the {shard_size} of "
            f"the shard axis, got {value!r}"
        )
    if value not in (1, shard_size):
        return value
    warnings.warn(
        f"reshard_after_forward={value} of {shard_size} ranks is the same as {value == shard_size}", stacklevel=3
    )
    return value == shard_size
