"""One checkpoint in one folder, such that a kill at any moment leaves a whole one to read. For one process at a time.

DCP writes `.metadata` last, so an unfinished checkpoint in an empty folder has none. In a folder that held a checkpoint
before, the old one would be mixed with the new; it is moved aside, to `<folder>.replaced`, until the new one is whole.
Readers change nothing: a write may be under way.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from .errors import CheckpointError
from .metadata import read_metadata

# What DCP and Megatron write into the folder of a checkpoint.
_OWN = re.compile(
    r".*\.distcp|(__\d+)?\.metadata(\.tmp)?|\.mfsdp2_.*|common\.pt|metadata\.json|modelopt_state.*|tokenizer.*"
)


def read_whole(path: Path) -> Metadata:
    """The metadata of the checkpoint at ``path``, which has every file that it names, at the length it needs.

    Raises:
        CheckpointError: there is no whole checkpoint; the message says why.
    """
    metadata = read_metadata(path)
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        assert isinstance(info, _StorageInfo)
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in needed.items():
        try:
            found = (path / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path / name} is missing") from None
        if found < size:
            raise CheckpointError(f"{path / name} has {found} bytes of {size}")
    return metadata


def problem_of(path: Path) -> str | None:
    """Why there is no whole checkpoint at ``path``; None if there is one."""
    try:
        read_whole(path)
    except CheckpointError as error:
        return str(error)
    return None


def is_complete(path: Path) -> bool:
    """Whether there is a whole checkpoint at ``path``: metadata, and every file it names at the length it needs."""
    return problem_of(path) is None


def find_readable(path: Path) -> Path:
    """The folder to read the checkpoint ``path`` from: itself, or what an unfinished write has moved aside.

    Raises:
        CheckpointError: neither is whole.
    """
    return open_readable(path)[0]


def open_readable(path: Path) -> tuple[Path, Metadata]:
    """As `find_readable`, with the metadata that was read to find out."""
    try:
        return path, read_whole(path)
    except CheckpointError as error:
        problem = error
    replaced = _replaced(path)
    try:
        metadata = read_whole(replaced)
    except CheckpointError:
        raise problem from None
    warnings.warn(f"{problem}; the checkpoint it should have replaced is read: {replaced}", stacklevel=3)
    return replaced, metadata


def begin_write(path: Path) -> None:
    """Make ``path`` an empty folder to write a checkpoint into. A whole checkpoint in it is moved aside.

    Raises:
        CheckpointError: the folder holds other files than a checkpoint's, or can't be written.
    """
    try:
        _make_room(path)
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".mfsdp2_"):
            pass
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error.strerror} ({error.filename})") from error


def end_write(path: Path) -> None:
    """Give up what ``begin_write`` moved aside, now that the new checkpoint is whole.

    Raises:
        CheckpointError: the new one isn't; the one before is still there.
    """
    if problem := problem_of(path):
        raise CheckpointError(f"{path} is not whole after the save: {problem}")
    sync_folder(path)
    shutil.rmtree(_replaced(path), ignore_errors=True)


def cancel_write(path: Path) -> None:
    """Put back what ``begin_write`` moved aside, as long as nothing was written."""
    with contextlib.suppress(OSError):
        if is_complete(_replaced(path)):
            path.rmdir()
            os.rename(_replaced(path), path)


def sync_folder(path: Path) -> None:
    """Make the names in a folder outlast a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replaced(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def _make_room(path: Path) -> None:
    if not path.is_dir():
        return
    if is_complete(path):
        # In this order one of the two is whole at every moment.
        shutil.rmtree(_replaced(path), ignore_errors=True)
        os.rename(path, _replaced(path))
        return
    entries = list(path.iterdir())
    _refuse_foreign(path, entries)
    for entry in entries:
        entry.unlink()


def _refuse_foreign(path: Path, entries: Iterable[Path]) -> None:
    foreign = sorted(entry.name for entry in entries if entry.is_dir() or not _OWN.fullmatch(entry.name))
    if foreign:
        raise CheckpointError(
            f"{path} holds files that no checkpoint has ({', '.join(foreign[:5])}): nothing is written there"
        )
