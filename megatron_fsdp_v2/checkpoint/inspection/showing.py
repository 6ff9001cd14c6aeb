"""Some values of a tensor, and what an object is, for people to look at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ..chunk_metadata import Chunk
from ..collective_errors import on_every_rank
from ..errors import CheckpointError
from ..stored_objects import read_object
from .contents import Checkpoint, Entry, digest_of
from .reading import TensorReader
from .tally import as_numbers

_FEW = 4
_MOST = 10_000


@dataclass(frozen=True)
class Preview:
    """Values of a tensor as nested lists, one level for each dimension, and which part of it they are, as "0:2,:4".

    Complex numbers are text. Values of a dtype that torch can't convert are those of their bytes, in one list.
    """

    part: str
    values: Any


def preview(checkpoint: Checkpoint, entry: Entry, part: str | None = None) -> Preview:
    """Some values of a tensor: those of ``part``, or the first few along the last two dimensions.

    ``part`` has a range or an index for each dimension, "0:2,:4" or "3"; of those not named it takes all.

    Raises:
        ValueError: ``part`` isn't of that form or for other dimensions, or has more than 10,000 elements.
        CheckpointError: on all ranks, if it can't be read on one.
    """
    assert entry.shape is not None
    box = _first_few(entry.shape) if part is None else _parsed(part, entry)
    if box.numel > _MOST:
        raise ValueError(f"{part!r} of {entry.key} {list(entry.shape)} has {box.numel:,} elements, at most {_MOST:,}")
    tensor = on_every_rank(lambda: TensorReader(checkpoint).read(entry, box))
    values = (as_numbers(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor).tolist()
    text = ",".join(f"{start}:{start + size}" for start, size in zip(box.offsets, box.sizes, strict=True))
    return Preview(text, _with_text(values))


@dataclass(frozen=True)
class ShownObject:
    """The text of an object, or why it is None, and the SHA-256 of its bytes."""

    sha256: str
    value: str | None
    unreadable: str | None


def show_object(checkpoint: Checkpoint, entry: Entry) -> ShownObject:
    """What an entry that is no tensor holds; never runs code from the checkpoint.

    Raises:
        CheckpointError: on all ranks, if its bytes aren't all there on one.
    """

    def show() -> ShownObject:
        digest = digest_of(checkpoint.path, entry)
        stored = TensorReader(checkpoint).read_bytes(entry)
        try:
            return ShownObject(digest, repr(read_object(stored, entry.key)), None)
        except CheckpointError as error:
            return ShownObject(digest, None, str(error))

    return on_every_rank(show)


def _first_few(shape: tuple[int, ...]) -> Chunk:
    sizes = [min(size, _FEW if dim >= len(shape) - 2 else 1) for dim, size in enumerate(shape)]
    return Chunk((0,) * len(shape), tuple(sizes))


def _parsed(part: str, entry: Entry) -> Chunk:
    assert entry.shape is not None
    texts = part.split(",") if part.strip() else []
    if len(texts) > len(entry.shape):
        raise ValueError(f"{part!r} is for {len(texts)} dimensions, {entry.key} has {len(entry.shape)}")
    offsets, sizes = [], []
    for text, size in zip(texts + [":"] * (len(entry.shape) - len(texts)), entry.shape, strict=True):
        if (match := re.fullmatch(r"\s*(-?\d*)\s*(:?)\s*(-?\d*)\s*", text)) is None or not text.strip():
            raise ValueError(f"{text!r} in {part!r} is neither an index nor a range such as 0:2")
        start, colon, stop = match.groups()
        if not colon and not -size <= int(start) < size:
            raise ValueError(f"index {start} in {part!r} is outside of {entry.key} {list(entry.shape)}")
        first = int(start) if start else None
        last = (int(stop) if stop else None) if colon else (int(start) + 1 or None)
        begin, end, _ = slice(first, last).indices(size)
        offsets.append(begin)
        sizes.append(max(0, end - begin))
    return Chunk(tuple(offsets), tuple(sizes))


def _with_text(values: Any) -> Any:
    if isinstance(values, list):
        return [_with_text(value) for value in values]
    return str(values) if isinstance(values, complex) else values
