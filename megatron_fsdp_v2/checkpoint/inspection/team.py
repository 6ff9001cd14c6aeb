"""The ranks that look at a checkpoint together. A process without a process group is a team of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import CheckpointError
from .tally import Tally


@dataclass(frozen=True)
class Team:
    """All ranks of the default process group, which has to be one for CPU tensors, such as gloo."""

    rank: int
    size: int

    @classmethod
    def current(cls) -> Team:
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)

    def check_same(self, what: str, seen: str) -> None:
        """Raises CheckpointError on all ranks unless all have ``seen`` the same."""
        if self.size == 1:
            return
        everywhere: list[Any] = [None] * self.size
        dist.all_gather_object(everywhere, seen)
        if len(set(everywhere)) > 1:
            raise CheckpointError(f"ranks see different contents of {what}; all need the same files")

    def share(self, sizes: Sequence[int]) -> Iterator[int]:
        """Positions in ``sizes`` that are this rank's: neighbours, about the same sum on every rank."""
        total, before = max(sum(sizes), 1), 0
        for position, size in enumerate(sizes):
            if min(before * self.size // total, self.size - 1) == self.rank:
                yield position
            before += size

    def add_up(self, tallies: list[Tally]) -> list[Tally]:
        """The same list on every rank, each tally over all ranks."""
        if self.size == 1 or not tallies:
            return tallies
        joined = Tally.stack(tallies)
        dist.all_reduce(joined.sums, op=dist.ReduceOp.SUM)
        dist.all_reduce(joined.peaks, op=dist.ReduceOp.MAX)
        return joined.unstack()
