"""Folders that appear under their name once they are whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.storage import sync_folder


def check_is_free(path: Path) -> None:
    """Raises ValueError unless there is nothing at `path`, or an empty folder."""
    if path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir()))):
        raise ValueError(f"{path} is there already; name a new or an empty folder")


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """A folder to write into, beside `path`, which gets that name at the end. After an error nothing is left.

    Raises:
        ValueError: there is something at `path`.
        CheckpointError: another conversion is writing there or was killed, or it can't be written.
    """
    check_is_free(path)
    path = Path(os.path.abspath(path))
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.mkdir()
    except FileExistsError:
        raise CheckpointError(
            f"{unfinished} is there: another conversion is writing it, or one was stopped; then remove it"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{unfinished} can't be made: {error.strerror}") from error
    try:
        yield unfinished
        sync_folder(unfinished)
        unfinished.rename(path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error.strerror} ({error.filename})") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_text(file: Path, text: str) -> None:
    """Writes a file that outlasts a crash of the machine."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def write_json(file: Path, content: dict[str, Any]) -> None:
    """As `write_text`, a JSON object."""
    write_text(file, json.dumps(content, indent=2) + "\n")
