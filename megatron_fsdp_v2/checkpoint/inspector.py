"""Looking into a checkpoint, comparing two, and changing keys.

Works in a single process, and on all ranks of a default process group for CPU tensors; then each rank reads its share
and all get the result. A checkpoint may be larger than memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from .chunk_metadata import Chunk
from .collective_errors import on_every_rank, on_rank_zero
from .inspection.contents import Checkpoint, Entry, digest_of, problems_of, select_keys
from .inspection.editing import Change, plan_removal, plan_rename
from .inspection.memory import checked_memory, elements_at_a_time
from .inspection.reading import TensorReader
from .inspection.showing import Preview, ShownObject, preview, show_object
from .inspection.tally import (
    NO_DIFFERENCE,
    NO_VALUES,
    Difference,
    Summary,
    Tally,
    tally_difference,
    tally_values,
)
from .inspection.team import Team
from .inspection.work import Progress, Work

__all__ = [
    "Change",
    "Checkpoint",
    "Comparison",
    "Difference",
    "Entry",
    "Preview",
    "Progress",
    "ShownObject",
    "Summary",
    "apply_change",
    "compare",
    "open_checkpoint",
    "plan_removal",
    "plan_rename",
    "preview",
    "problems_of",
    "show_object",
    "summarize",
]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint on all ranks.

    Raises:
        CheckpointError: on all ranks, if it can't be read on one or isn't the same everywhere; see `read_metadata`.
    """
    checkpoint = on_every_rank(lambda: Checkpoint(path))
    Team.current().check_same(str(path), checkpoint.digest)
    return checkpoint


def summarize(
    checkpoint: Checkpoint, entries: Sequence[Entry], *, memory: int | None = None, progress: Progress | None = None
) -> dict[str, Summary]:
    """Figures of these entries by key; objects have none. All ranks call it with the same arguments.

    Args:
        memory: bytes that this rank may use beside what Python and torch take; see `default_memory`.

    Raises:
        ValueError: ``memory`` is below 64 KiB.
        CheckpointError: on all ranks, if something can't be read on one.
    """
    limit = checked_memory(memory)
    tensors = [entry for entry in entries if entry.dtype is not None]
    reader = TensorReader(checkpoint)

    def look(entry: Entry, box: Chunk) -> Tally:
        return tally_values(reader.read(entry, box))

    work = Work()
    for position, entry in enumerate(tensors):
        assert entry.dtype is not None
        work.add_tensor(position, entry, elements_at_a_time(limit, entry.dtype), partial(look, entry))
    tallies = work.run([NO_VALUES] * len(tensors), progress)
    return {entry.key: Summary.of(tally) for entry, tally in zip(tensors, tallies, strict=True)}


@dataclass(frozen=True)
class Comparison:
    """What two checkpoints, A and B, have in common and what not; keys are alphabetical.

    ``differences`` has the figures of all tensors of equal shape, and ``unlike`` the keys of which A and B have
    different kinds, shapes or dtypes, each with what A and what B has. ``objects`` says for each object whether its
    bytes are the same.
    """

    only_a: list[str]
    only_b: list[str]
    unlike: dict[str, tuple[str, str]]
    differences: dict[str, Difference]
    objects: dict[str, bool]

    @property
    def different(self) -> list[str]:
        """Keys of which the values differ by more than the tolerances."""
        values = [key for key, difference in self.differences.items() if difference.differing]
        return sorted(values + [key for key, same in self.objects.items() if not same])

    @property
    def is_equal(self) -> bool:
        return not (self.only_a or self.only_b or self.unlike or self.different)


def compare(
    a: Checkpoint,
    b: Checkpoint,
    *,
    pattern: str | None = None,
    strip_prefix: str = "",
    atol: float = 0.0,
    rtol: float = 0.0,
    memory: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Compares two checkpoints key by key. All ranks call it with the same arguments.

    Args:
        pattern: compare only keys that match; see `Checkpoint.select`. The prefix is gone by then.
        strip_prefix: taken off the keys of both that begin with it.
        atol, rtol: tolerances; see `Difference`. Objects are compared byte by byte, through their SHA-256.
        memory: see `summarize`.

    Raises:
        ValueError: no key matches in either, two keys of one checkpoint are the same without the prefix, a tolerance is
            negative or ``memory`` is below 64 KiB.
        CheckpointError: on all ranks, if something can't be read on one.
    """
    limit = checked_memory(memory)
    for name, value in (("atol", atol), ("rtol", rtol)):
        if not value >= 0:
            raise ValueError(f"{name}={value}: a tolerance is at least 0")
    entries_a, entries_b = _by_name(a, strip_prefix, pattern), _by_name(b, strip_prefix, pattern)
    if not entries_a and not entries_b:
        raise ValueError(f"no key of {a.path} or {b.path} matches {pattern!r}; `list` shows the keys")
    common = sorted(entries_a.keys() & entries_b.keys())
    pairs = {name: (entries_a[name], entries_b[name]) for name in common}
    unlike = {name: said for name, (x, y) in pairs.items() if (said := (_described(x), _described(y)))[0] != said[1]}
    comparable = [name for name, (x, y) in pairs.items() if x.kind == y.kind and x.shape == y.shape]
    tallies = _compare_values(a, b, [pairs[name] for name in comparable], (atol, rtol), limit, progress)
    found = {name: Difference.of(tally) for name, tally in zip(comparable, tallies, strict=True)}
    return Comparison(
        only_a=sorted(entries_a.keys() - entries_b.keys()),
        only_b=sorted(entries_b.keys() - entries_a.keys()),
        unlike=unlike,
        differences={name: found[name] for name in comparable if pairs[name][0].kind == "tensor"},
        objects={name: not found[name].differing for name in comparable if pairs[name][0].kind == "object"},
    )


def apply_change(change: Change) -> None:
    """Does on rank 0 what was planned there; all ranks call it and return once it is done.

    Raises:
        CheckpointError: on all ranks; see `Change.apply`.
    """
    on_rank_zero(change.apply)


def _compare_values(
    a: Checkpoint,
    b: Checkpoint,
    pairs: list[tuple[Entry, Entry]],
    tolerances: tuple[float, float],
    limit: int,
    progress: Progress | None,
) -> list[Tally]:
    reader_a, reader_b = TensorReader(a), TensorReader(b)

    def compare_boxes(x: Entry, y: Entry, box: Chunk) -> Tally:
        return tally_difference(reader_a.read(x, box), reader_b.read(y, box), *tolerances)

    def compare_objects(x: Entry, y: Entry) -> Tally:
        return Tally.of([1, digest_of(a.path, x) != digest_of(b.path, y), 0, 0], [0.0, 0.0])

    work = Work()
    for position, (x, y) in enumerate(pairs):
        if x.dtype is None or y.dtype is None:
            work.add(position, x.length + y.length, partial(compare_objects, x, y))
        else:
            most = elements_at_a_time(limit, x.dtype, y.dtype)
            work.add_tensor(position, x, most, partial(compare_boxes, x, y), y.dtype.itemsize)
    return work.run([NO_DIFFERENCE] * len(pairs), progress)


def _by_name(checkpoint: Checkpoint, strip_prefix: str, pattern: str | None) -> dict[str, Entry]:
    named: dict[str, Entry] = {}
    for key, entry in checkpoint.entries.items():
        name = key.removeprefix(strip_prefix)
        if name in named:
            raise ValueError(f"without {strip_prefix!r} two keys of {checkpoint.path} are {name!r}")
        named[name] = entry
    return {name: named[name] for name in select_keys(named, pattern)}


def _described(entry: Entry) -> str:
    return "object" if entry.dtype is None else f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape or ())}"
