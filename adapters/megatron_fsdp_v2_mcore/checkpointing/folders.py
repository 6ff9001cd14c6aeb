"""Where the checkpoints of a run are: the tracker file, the folders of iterations, and what is wrong with them."""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.core import dist_checkpointing
from megatron.training.checkpointing import get_checkpoint_name, get_checkpoint_tracker_filename

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.storage import find_readable, is_complete

_ITERATION = re.compile(r"iter_(\d+)(\.replaced)?")
RELEASE = "release"
type Format = Literal["fsdp_dtensor", "torch_dist"]


@dataclass(frozen=True)
class Found:
    """The checkpoint that a run starts from."""

    path: Path
    format: Format
    iteration: int
    release: bool


def find_checkpoint(folder: str | None, step: int | None) -> Found | None:
    """The checkpoint to load from a run's folder; None if it holds none. Changes nothing: a run may be writing there.

    Args:
        folder: of `--load` or `--pretrained-checkpoint`.
        step: of `--ckpt-step`; by default what the tracker file says.

    Raises:
        CheckpointError: the checkpoint is not there, not whole, or of a format that isn't loaded.
    """
    tracker = Path(get_checkpoint_tracker_filename(folder)) if folder is not None else None
    if tracker is None or not (tracker.is_file() or step):
        return None
    text = str(step) if step else _read_tracker(tracker)
    release = text == RELEASE
    iteration = 0 if release else int(text)
    path = Path(get_checkpoint_name(folder, iteration, release, return_base_dir=True))
    return Found(*_readable(path), iteration, release)


def complete_iterations(folder: Path) -> list[tuple[int, Path]]:
    """The whole checkpoints of a run in order of their iterations."""
    found = {
        int(match[1]): entry
        for entry in sorted(folder.iterdir() if folder.is_dir() else ())
        if (match := _ITERATION.fullmatch(entry.name)) and entry.is_dir() and _is_whole(entry)
    }
    return sorted(found.items())


def mend_tracker(folder: Path) -> None:
    """Writes a tracker file that a kill left empty anew: with the iteration of the newest whole checkpoint, if any.

    Stock reads it when it saves, on one rank only.
    """
    tracker = Path(get_checkpoint_tracker_filename(str(folder)))
    if not tracker.is_file() or _is_valid(tracker.read_text(errors="replace").strip()):
        return
    if complete_iterations(folder):
        _write_atomically(tracker, _read_tracker(tracker))
    else:
        tracker.unlink()


def _read_tracker(tracker: Path) -> str:
    """What the tracker says. A kill while it is written leaves it empty; then it's the newest whole checkpoint."""
    text = tracker.read_text(errors="replace").strip()
    if _is_valid(text):
        return text
    intact = complete_iterations(tracker.parent)
    if not intact:
        raise CheckpointError(f"{tracker} is damaged (it says {text[:40]!r}) and there is no whole checkpoint")
    latest = str(intact[-1][0])
    warnings.warn(
        f"{tracker} is damaged (it says {text[:40]!r}); the newest whole checkpoint is {latest}", stacklevel=2
    )
    return latest


def _is_valid(text: str) -> bool:
    return (text.isascii() and text.isdigit()) or text == RELEASE


def _write_atomically(file: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}", delete=False) as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(stream.name, file)


def _readable(path: Path) -> tuple[Path, Format]:
    if path.is_dir() and dist_checkpointing.check_is_distributed_checkpoint(str(path)):
        return path, "torch_dist"
    if path.is_dir() and any(entry.name.startswith("mp_rank_") for entry in path.iterdir()):
        raise CheckpointError(
            f"{path} is a checkpoint in the format torch, which isn't sharded: save it with --ckpt-format torch_dist"
        )
    try:
        return find_readable(path), "fsdp_dtensor"
    except CheckpointError as error:
        others = ", ".join(str(iteration) for iteration, _ in complete_iterations(path.parent))
        advice = f"whole are the iterations {others}: --ckpt-step chooses one" if others else "there is no whole one"
        raise CheckpointError(f"{error}; {advice}") from None


def _is_whole(path: Path) -> bool:
    return is_complete(path) or dist_checkpointing.check_is_distributed_checkpoint(str(path))
