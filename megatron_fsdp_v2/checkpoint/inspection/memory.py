"""How much of a checkpoint is in memory at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from ..chunk_metadata import Chunk

_MOST = 4 << 30
_LEAST = 64 << 10
# More elements at a time are slower: what works on them leaves the caches.
_MOST_ELEMENTS = 1 << 20
# Beside the elements read and what they are read through: float64 copies, differences, masks and positions.
_WORKING_BYTES = {1: 32, 2: 96}


def default_memory() -> int:
    """Bytes that one rank may use: 0.7 of what is free, for two tensors on each rank of this machine; at most 4 GiB."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(_LEAST, min(_MOST, int(0.7 * _free_memory() / (2 * local_ranks))))


def checked_memory(memory: int | None) -> int:
    """The limit asked for, or the default.

    Raises:
        ValueError: it is too small to work with.
    """
    if memory is None:
        return default_memory()
    if memory < _LEAST:
        raise ValueError(f"memory={memory}: at least {_LEAST} bytes are needed")
    return memory


def elements_at_a_time(memory: int, *dtypes: torch.dtype) -> int:
    """How many elements of one tensor, or of two at once, can be looked at within ``memory`` bytes; at least one."""
    working = _WORKING_BYTES[len(dtypes)] * (2 if any(dtype.is_complex for dtype in dtypes) else 1)
    each = working + sum(2 * dtype.itemsize for dtype in dtypes)
    return max(1, min(memory // each, _MOST_ELEMENTS))


def boxes(shape: tuple[int, ...], most: int) -> Iterator[Chunk]:
    """Boxes of at most ``most`` elements that tile a tensor, none if it has no elements.

    They are rows if one fits, and parts of rows otherwise; in either case neighbours in row-major order.
    """
    if 0 in shape:
        return
    if not shape:
        yield Chunk((), ())
        return
    dim = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= most)
    rest = shape[dim + 1 :]
    step = most // math.prod(rest)
    for index in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            sizes = (*[1] * dim, min(step, shape[dim] - start), *rest)
            yield Chunk((*index, start, *[0] * len(rest)), sizes)


def _free_memory() -> int:
    """Bytes that this process can have, within what its container may use."""
    free = [_available(), _below_limit()]
    return min(value for value in free if value is not None)


def _available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _below_limit() -> int | None:
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return max(0, int(limit.read_text()) - int(used.read_text()))
    # No such files, or the limit "max".
    except (OSError, ValueError):
        return None
