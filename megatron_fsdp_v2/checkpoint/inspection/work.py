"""Looking at many boxes of many tensors, each rank at its share of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ..chunk_metadata import Chunk
from ..collective_errors import on_every_rank
from .contents import Entry
from .memory import boxes
from .tally import Tally
from .team import Team

# Called with the bytes this rank has read and those it is going to read.
Progress = Callable[[int, int], None]


class Work:
    """Pieces of work of about known size, done by all ranks together."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, Callable[[], Tally]]] = []

    def add(self, position: int, size: int, look: Callable[[], Tally]) -> None:
        """``look`` belongs to the result at ``position`` and reads about ``size`` bytes."""
        self._pieces.append((position, size, look))

    def add_tensor(
        self, position: int, entry: Entry, most: int, look: Callable[[Chunk], Tally], more_per_element: int = 0
    ) -> None:
        """As `add`, for each box of at most ``most`` elements."""
        assert entry.shape is not None
        assert entry.dtype is not None
        for box in boxes(entry.shape, most):
            self.add(position, box.numel * (entry.dtype.itemsize + more_per_element), partial(look, box))

    def run(self, start: Iterable[Tally], progress: Progress | None) -> list[Tally]:
        """The tallies of all pieces, added to what they start from, on every rank."""
        team = Team.current()
        tallies = list(start)

        def do_my_share() -> None:
            sizes = [size for _, size, _ in self._pieces]
            mine = list(team.share(sizes))
            total, done = sum(sizes[number] for number in mine), 0
            for number in mine:
                position, size, look = self._pieces[number]
                tallies[position] = tallies[position] + look()
                done += size
                if progress is not None:
                    progress(done, total)

        on_every_rank(do_my_share)
        return team.add_up(tallies)
