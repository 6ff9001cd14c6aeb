"""Which buffers may share memory, as graph colouring. Arithmetic alone."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Set
from typing import NamedTuple


class PlannedSlot(NamedTuple):
    """Memory of ``nbytes`` for ``keys`` that are never in use together; the first of them is the largest."""

    nbytes: int
    keys: tuple[Hashable, ...]


def color(
    sizes: Mapping[Hashable, int], conflicts: Mapping[Hashable, Set[Hashable]], ranks: Mapping[Hashable, int]
) -> list[PlannedSlot]:
    """Share the memory of buffers among those that don't conflict.

    Buffers are placed from the largest to the smallest, equal ones by their ``ranks``, which are distinct: each goes to
    the smallest slot that holds none of its conflicts, or opens one of just its size. So slots never grow, and the same
    input gives the same slots on every rank. Buffers may be in use several times, which makes the graph a general one:
    the result is a good one, and the best for buffers of one size that are in use once.

    Args:
        sizes: bytes of each buffer.
        conflicts: for each buffer those in use together with it at some time; symmetric.
        ranks: distinct numbers that order buffers of one size.
    """
    nbytes: list[int] = []
    members: list[list[Hashable]] = []
    placed: dict[Hashable, int] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], ranks[key])):
        taken = {placed[other] for other in conflicts.get(key, ()) if other in placed}
        free = [slot for slot in range(len(nbytes)) if slot not in taken]
        if free:
            slot = min(free, key=lambda slot: (nbytes[slot], slot))
        else:
            slot = len(nbytes)
            nbytes.append(sizes[key])
            members.append([])
        placed[key] = slot
        members[slot].append(key)
    return [PlannedSlot(size, tuple(keys)) for size, keys in zip(nbytes, members, strict=True)]
