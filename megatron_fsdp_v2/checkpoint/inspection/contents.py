"""What a checkpoint lists: its entries, their boxes and the files these are in."""

from __future__ import annotations

import hashlib
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ..chunk_metadata import Chunk
from ..errors import CheckpointError
from ..metadata import FILE_NAME, read_metadata


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor, or a whole object: ``length`` bytes from ``offset`` on; no file if they are nowhere."""

    box: Chunk
    file: str | None
    offset: int
    length: int


@dataclass(frozen=True)
class Entry:
    """One key of a checkpoint. An object (anything that is no tensor) has no shape and no dtype, and one chunk."""

    key: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: tuple[StoredChunk, ...]

    @property
    def kind(self) -> Literal["tensor", "object"]:
        return "object" if self.dtype is None else "tensor"

    @property
    def numel(self) -> int:
        """Elements of the tensor; 0 for an object."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(sorted({chunk.file for chunk in self.chunks if chunk.file is not None}))

    @property
    def length(self) -> int:
        """Bytes in files, headers included."""
        return sum(chunk.length for chunk in self.chunks)


class Checkpoint:
    """An opened checkpoint: a folder with DCP's `.metadata`, as plain DCP, stock Megatron or this package save it.

    ``entries`` has all keys in alphabetical order; ``digest`` tells one state of `.metadata` from another.

    Raises:
        CheckpointError: see `read_metadata`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata = read_metadata(self.path / FILE_NAME)
        self.digest = hashlib.sha256((self.path / FILE_NAME).read_bytes()).hexdigest()
        self.entries = {key: _entry(key, self.metadata) for key in sorted(self.metadata.state_dict_metadata)}

    def select(self, pattern: str | None) -> list[Entry]:
        """The entries whose keys `select_keys` takes, in alphabetical order."""
        return [self.entries[key] for key in select_keys(self.entries, pattern)]

    def select_some(self, pattern: str) -> list[Entry]:
        """As `select`, except that nothing is an error.

        Raises:
            ValueError: nothing matches.
        """
        if not (found := self.select(pattern)):
            raise ValueError(f"no key of {self.path} matches {pattern!r}; `list` shows the keys")
        return found

    def other_files(self) -> list[str]:
        """Files in the folder that hold nothing of any entry, `.metadata` aside."""
        used = {file for entry in self.entries.values() for file in entry.files} | {FILE_NAME}
        return sorted(file.name for file in self.path.iterdir() if file.is_file() and file.name not in used)


def select_keys(keys: Collection[str], pattern: str | None) -> list[str]:
    """The key that is the pattern or, if there is none, those that the pattern matches; all without a pattern.

    Patterns are those of `fnmatch`: ``*`` is any text, dots included, ``?`` one character, ``[ab]`` one of several.
    """
    if pattern is None:
        return sorted(keys)
    return [pattern] if pattern in keys else sorted(key for key in keys if fnmatchcase(key, pattern))


def problems_of(path: Path, entries: Iterable[Entry]) -> list[str]:
    """What makes entries unreadable: boxes missing, files missing or too short. One line each."""
    ends: dict[str, int] = defaultdict(int)
    problems = []
    for entry in entries:
        problems += [f"{entry.key}: {problem}" for problem in _gaps(entry)]
        for chunk in entry.chunks:
            if chunk.file is not None:
                ends[chunk.file] = max(ends[chunk.file], chunk.offset + chunk.length)
    for name, end in sorted(ends.items()):
        file = path / name
        if not file.is_file():
            problems.append(f"{name}: the file is missing")
        elif (size := file.stat().st_size) < end:
            problems.append(f"{name}: the file ends at byte {size:,} and should have {end:,}")
    return problems


def _gaps(entry: Entry) -> Iterator[str]:
    if any(chunk.file is None for chunk in entry.chunks):
        yield "some of it is in no file"
    covered = sum(chunk.box.numel for chunk in entry.chunks)
    if entry.shape is not None and covered < entry.numel:
        yield f"its boxes have {covered:,} of {entry.numel:,} elements"


def _entry(key: str, metadata: Metadata) -> Entry:
    found = metadata.state_dict_metadata[key]
    if not isinstance(found, TensorStorageMetadata):
        return Entry(key, None, None, (_stored(metadata, MetadataIndex(key), Chunk((), ())),))
    chunks = [
        _stored(metadata, MetadataIndex(key, chunk.offsets), Chunk(tuple(chunk.offsets), tuple(chunk.sizes)))
        for chunk in found.chunks
    ]
    return Entry(key, tuple(found.size), found.properties.dtype, tuple(chunks))


def _stored(metadata: Metadata, index: MetadataIndex, box: Chunk) -> StoredChunk:
    info = metadata.storage_data.get(index)
    if info is None:
        return StoredChunk(box, None, 0, 0)
    return StoredChunk(box, info.relative_path, info.offset, info.length)


def digest_of(path: Path, entry: Entry) -> str:
    """SHA-256 of the bytes of an object, as they are in its file.

    Raises:
        CheckpointError: the bytes aren't all there.
    """
    (chunk,) = entry.chunks
    if chunk.file is None:
        raise CheckpointError(f"{entry.key} is in no file of {path}")
    digest, left = hashlib.sha256(), chunk.length
    try:
        with (path / chunk.file).open("rb") as stream:
            stream.seek(chunk.offset)
            while left and (block := stream.read(min(left, 1 << 20))):
                digest.update(block)
                left -= len(block)
    except OSError as error:
        raise CheckpointError(f"{entry.key}: {path / chunk.file} can't be read: {error.strerror}") from error
    if left:
        raise CheckpointError(f"{entry.key}: {path / chunk.file} ends {left:,} bytes too early")
    return digest.hexdigest()
