"""Errors of one rank raised on all of them, so that none waits for a rank that has given up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from .errors import CheckpointError


def on_rank_zero[T](function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What ``function`` returns on the group's first rank, on every rank; a collective. It must be picklable.

    Raises:
        CheckpointError: it raised on that rank; on every rank, with its message.
    """
    if not _has_others(group):
        return _translated(function)
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        outcome = outcome_of(function)
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    result: T = outcome[0]
    return result


def on_every_rank[T](function: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """What ``function`` returns on this rank, once it has returned on all; a collective. It must make none itself.

    Raises:
        CheckpointError: it raised on some rank; on every rank, with each rank's message once.
    """
    if not _has_others(group):
        return _translated(function)
    result, problem = outcome_of(function)
    problems: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(problems, problem, group=group)
    if text := problems_together(problems):
        raise CheckpointError(text)
    value: T = result
    return value


def problems_together(problems: Sequence[str | None]) -> str | None:
    """One text for what went wrong on which rank, each message once; None if nothing did anywhere."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(problems):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    if list(by_text.values()) == [list(range(len(problems)))]:
        return next(iter(by_text))
    return "\n".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()) or None


def causes_of(error: CheckpointException) -> str:
    """What made DCP give up on which rank, in one line; each cause once."""
    causes: dict[str, int] = {}
    for rank, (cause, _) in sorted(error.failures.items()):
        text = _text_of(cause) if isinstance(cause, Exception) else repr(cause)
        causes.setdefault(text, rank)
    return "; ".join(f"rank {rank}: {text}" for text, rank in causes.items())


def _has_others(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _translated[T](function: Callable[[], T]) -> T:
    try:
        return function()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(_text_of(error)) from error


def outcome_of(function: Callable[[], Any]) -> list[Any]:
    """What a function returned and None, or None and the message of what it raised."""
    try:
        return [function(), None]
    # Whatever it is, the other ranks have to hear of it.
    except Exception as error:
        return [None, _text_of(error)]


def _text_of(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{type(error).__name__}: {error}"
