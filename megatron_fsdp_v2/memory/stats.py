"""Figures of an allocator, as data and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ArenaStats:
    """Figures of the buffers of one device that one stream orders. ``arena`` is None for buffers outside of pools.

    ``pool_bytes`` is the memory held for them, ``peak_live_bytes`` the most that was in use at once. ``slots`` counts
    the allocations behind them, each shared by buffers that are never in use together.
    """

    arena: str | None
    device: str
    pool_bytes: int
    live_bytes: int
    peak_live_bytes: int
    slots: int
    keys: int


@dataclass(frozen=True)
class AllocatorStats:
    """Figures of one rank's allocator; sizes in bytes.

    ``pool_bytes`` and ``live_bytes`` are totals over the arenas with a name. ``peak_live_bytes`` is the most that was
    in use at once in all of them, for a pool over the traced step: no placement can do with less. A pool, which keeps
    streams apart, may need up to the sum of the arenas' own peaks, and more where sizes differ much. ``late_keys`` were
    first used after the plan and share memory with none.
    """

    phase: str
    generation: int
    pool_bytes: int
    live_bytes: int
    peak_live_bytes: int
    arenas: tuple[ArenaStats, ...] = ()
    collisions: int = 0
    late_keys: int = 0
    redundant_frees: int = 0


class ArenaTally:
    """Counts live bytes per arena and device, and their peaks. The totals leave out what is in no arena."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        # Live bytes, their peak, and the number of live buffers.
        self._arenas: dict[tuple[str | None, torch.device], list[int]] = {}

    def add(self, arena: str | None, device: torch.device, nbytes: int) -> None:
        """A buffer takes memory."""
        counts = self._arenas.get((arena, device))
        if counts is None:
            counts = self._arenas[arena, device] = [0, 0, 0]
        counts[0] += nbytes
        counts[1] = max(counts[0], counts[1])
        counts[2] += 1
        if arena is not None:
            self.live_bytes += nbytes
            self.peak_bytes = max(self.live_bytes, self.peak_bytes)

    def remove(self, arena: str | None, device: torch.device, nbytes: int) -> None:
        """A buffer gives its memory back."""
        counts = self._arenas[arena, device]
        counts[0] -= nbytes
        counts[2] -= 1
        if arena is not None:
            self.live_bytes -= nbytes

    def arenas(self) -> tuple[ArenaStats, ...]:
        """Figures where each buffer has memory of its own."""
        return tuple(
            ArenaStats(arena, str(device), live, live, peak, buffers, buffers)
            for (arena, device), (live, peak, buffers) in self._arenas.items()
        )


def stats_table(stats: AllocatorStats) -> str:
    """The figures as lines of text, sizes in MiB."""
    rows: list[tuple[str, ...]] = [("arena", "device", "held", "in use", "peak use", "slots", "buffers")]
    for arena in stats.arenas:
        sizes = [mebibytes(size) for size in (arena.pool_bytes, arena.live_bytes, arena.peak_live_bytes)]
        rows.append((arena.arena or "none", arena.device, *sizes, str(arena.slots), str(arena.keys)))
    sizes = [mebibytes(size) for size in (stats.pool_bytes, stats.live_bytes, stats.peak_live_bytes)]
    rows.append(("named (MiB)", "", *sizes, *_counts([arena for arena in stats.arenas if arena.arena is not None])))
    head = (
        f"phase {stats.phase}, generation {stats.generation}, collisions {stats.collisions}, "
        f"late buffers {stats.late_keys}, redundant frees {stats.redundant_frees}"
    )
    return "\n".join([head, *aligned(rows)])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with columns: the first two to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def mebibytes(size: int) -> str:
    """A size in MiB with two decimals."""
    return f"{size / 2**20:.2f}"


def _counts(arenas: Sequence[ArenaStats]) -> tuple[str, str]:
    return str(sum([arena.slots for arena in arenas])), str(sum([arena.keys for arena in arenas]))
