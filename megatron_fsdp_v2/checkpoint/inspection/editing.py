"""Other keys for entries, and fewer entries: a new `.metadata`. Files of a checkpoint are never rewritten."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from ..errors import CheckpointError
from ..metadata import FILE_NAME, read_metadata
from ..storage import sync_folder
from .contents import Checkpoint

# Megatron keeps an object as one entry for each part, and loads all of them or none.
_PART = re.compile(r"(?P<object>.+)/shard_[\d.]+_[\d.]+")


@dataclass(frozen=True)
class Change:
    """What is going to happen to a checkpoint. Nothing happens until `apply`.

    ``keys`` has the new key for each old one, or None for a key to remove; ``files`` are those that no entry needs
    then, ``freed`` their bytes, ``kept`` the bytes of removed entries in files that others need.
    """

    checkpoint: Checkpoint
    keys: dict[str, str | None]
    files: tuple[str, ...] = ()
    freed: int = 0
    kept: int = 0

    def apply(self) -> None:
        """Replaces `.metadata` in one step, then deletes the files that nothing needs any more.

        Whenever this is interrupted, the checkpoint is the old or the new one; at worst unneeded files are left.

        Raises:
            CheckpointError: `.metadata` was changed in the meantime, or can't be written.
        """
        path = self.checkpoint.path
        if Checkpoint(path).digest != self.checkpoint.digest:
            raise CheckpointError(f"{path / FILE_NAME} was changed by someone else; nothing was done")
        try:
            _replace(path / FILE_NAME, _renamed(self.checkpoint.metadata, self.keys))
            for name in self.files:
                (path / name).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"{error.filename or path} can't be changed: {error.strerror}") from error


def plan_rename(checkpoint: Checkpoint, old: str, new: str) -> Change:
    """Gives the entry ``old`` the key ``new``; or with stars in both, every entry that matches.

    A star in ``old`` matches any text, the first one as much as it can, and the stars in ``new`` are replaced by what
    those in ``old`` matched, in order. No other character is special.

    Raises:
        ValueError: no key matches, the numbers of stars differ, two entries would have the same key, a key would also
            be the beginning of another's path, a list would have gaps, or an object of Megatron's would be torn apart.
    """
    if old.count("*") != new.count("*"):
        raise ValueError(f"{old!r} has {old.count('*')} stars and {new!r} has {new.count('*')}; both need as many")
    pattern = re.compile("(.*)".join(re.escape(part) for part in old.split("*")), re.DOTALL)
    keys: dict[str, str | None] = {}
    for key in checkpoint.entries:
        if match := pattern.fullmatch(key):
            texts = (*match.groups(), "")
            target = "".join(part + text for part, text in zip(new.split("*"), texts, strict=True))
            if target != key:
                keys[key] = target
    if not keys:
        raise ValueError(f"no key of {checkpoint.path} matches {old!r} and would change; `list` shows the keys")
    _refuse_collisions(checkpoint.entries, keys)
    _refuse_torn_objects(checkpoint.entries, keys)
    _refuse_crossed_paths(_renamed(checkpoint.metadata, keys))
    _refuse_gaps(checkpoint.metadata, keys)
    return Change(checkpoint, keys)


def plan_removal(checkpoint: Checkpoint, patterns: Collection[str]) -> Change:
    """Removes the entries that any of the patterns selects; see `Checkpoint.select`.

    Raises:
        ValueError: a pattern matches nothing, nothing would be left, a list would have gaps, or an object of Megatron's
            would be torn apart.
    """
    entries = {entry.key: entry for pattern in patterns for entry in checkpoint.select_some(pattern)}
    keys: dict[str, str | None] = dict.fromkeys(sorted(entries))
    if len(keys) == len(checkpoint.entries):
        raise ValueError(f"{', '.join(patterns)}: nothing would be left; delete the folder {checkpoint.path} instead")
    _refuse_torn_objects(checkpoint.entries, keys)
    _refuse_gaps(checkpoint.metadata, keys)
    needed = {file for key, entry in checkpoint.entries.items() if key not in keys for file in entry.files}
    concerned = {file for entry in entries.values() for file in entry.files}
    freed = tuple(sorted(file for file in concerned - needed if (checkpoint.path / file).is_file()))
    chunks = [chunk for entry in entries.values() for chunk in entry.chunks]
    return Change(
        checkpoint,
        keys,
        files=freed,
        freed=sum((checkpoint.path / file).stat().st_size for file in freed),
        kept=sum(chunk.length for chunk in chunks if chunk.file in needed),
    )


def _refuse_collisions(entries: Collection[str], keys: Mapping[str, str | None]) -> None:
    owners: dict[str, str] = {}
    for key in entries:
        target = keys.get(key, key)
        assert target is not None
        if not target:
            raise ValueError(f"{key!r} would have an empty key")
        if target in owners:
            raise ValueError(f"{owners[target]!r} and {key!r} would both be {target!r}")
        owners[target] = key


def _refuse_torn_objects(entries: Collection[str], keys: Mapping[str, str | None]) -> None:
    """Parts of one object have to end under one name, as the same parts, or all be gone."""
    fates: dict[str, set[str | None]] = {}
    for key in entries:
        if part := _PART.fullmatch(key):
            name, target = part["object"], keys.get(key, key)
            suffix = key.removeprefix(name)
            if target is not None and not target.endswith(suffix):
                raise ValueError(f"{key!r} is part of an object; its new key has to end with {suffix!r}, too")
            fates.setdefault(name, set()).add(target and target.removesuffix(suffix))
    for name, seen in fates.items():
        if len(seen) > 1:
            raise ValueError(f"{name!r} is one object in several parts; all have to change alike: '{name}/*'")


def _refuse_crossed_paths(metadata: Metadata) -> None:
    """Rebuilding the nested state would need a value where others need a folder."""
    paths = {tuple(map(str, path)): key for key, path in _paths(metadata).items()}
    for path in paths:
        for length in range(1, len(path)):
            if other := paths.get(path[:length]):
                raise ValueError(f"{other!r} would be a value and also the beginning of {paths[path]!r}")


def _refuse_gaps(metadata: Metadata, keys: Mapping[str, str | None]) -> None:
    """DCP can't rebuild a list without all of its items."""
    items: dict[tuple[Any, ...], set[int]] = {}
    for path in _paths(_renamed(metadata, keys)).values():
        for length, step in enumerate(path):
            if isinstance(step, int):
                items.setdefault(path[:length], set()).add(step)
    for path, numbers in items.items():
        if len(numbers) <= max(numbers):
            name = ".".join(map(str, path))
            raise ValueError(f"{name!r} is a list, and some items before {name}.{max(numbers)} would be missing")


def _renamed(metadata: Metadata, keys: Mapping[str, str | None]) -> Metadata:
    """The metadata with other keys, and without those that have none."""
    storage = {}
    for index, info in metadata.storage_data.items():
        if (target := keys.get(index.fqn, index.fqn)) is not None:
            storage[dataclasses.replace(index, fqn=target)] = info
    changed = Metadata({})
    # The save plans of all ranks speak of old keys, and Megatron can do without.
    vars(changed).update({name: value for name, value in vars(metadata).items() if name != "all_local_plans"})
    changed.state_dict_metadata, changed.storage_data = _rekeyed(metadata.state_dict_metadata, keys), storage
    if paths := _paths(metadata):
        renamed = {old: _renamed_path(old, keys.get(old, old), path) for old, path in paths.items()}
        changed.planner_data = _rekeyed(renamed, keys)
    if isinstance(shapes := vars(metadata).get("mcore_data"), dict):
        vars(changed)["mcore_data"] = _rekeyed(shapes, keys)
    return changed


def _paths(metadata: Metadata) -> dict[str, tuple[Any, ...]]:
    """Where each value is in the nested state that was saved, if that is known."""
    paths = metadata.planner_data or {}
    if not isinstance(paths, dict) or not all(isinstance(path, tuple) for path in paths.values()):
        raise CheckpointError("the checkpoint was saved by a planner whose data isn't understood; it can't be changed")
    return paths


def _rekeyed(values: Mapping[str, Any], keys: Mapping[str, str | None]) -> dict[str, Any]:
    return {target: value for key, value in values.items() if (target := keys.get(key, key)) is not None}


def _renamed_path(old: str, new: str | None, path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where a value is in the nested state, given where it was.

    Equal steps at both ends stay. Of the others each takes as many parts of the key as it had, the last one the rest.
    """
    if new is None or new == old:
        return path
    first, last, middle = 0, len(path), new
    while last > first + 1 and middle.endswith(f".{path[last - 1]}"):
        last -= 1
        middle = middle.removesuffix(f".{path[last]}")
    while first < last - 1 and middle.startswith(f"{path[first]}."):
        middle = middle.removeprefix(f"{path[first]}.")
        first += 1
    parts, steps = middle.split("."), []
    for step in path[first : last - 1]:
        count = str(step).count(".") + 1
        if len(parts) > count:
            steps.append(".".join(parts[:count]))
            parts = parts[count:]
    steps.append(".".join(parts))
    in_list = last - first == 1 and isinstance(path[first], int) and middle.isdecimal()
    return (*path[:first], *([int(middle)] if in_list else steps), *path[last:])


def _replace(file: Path, metadata: Metadata) -> None:
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f"{FILE_NAME}.", delete=False) as stream:
        new = Path(stream.name)
        try:
            pickle.dump(metadata, stream)
            stream.flush()
            os.fsync(stream.fileno())
            shutil.copymode(file, new)
            if read_metadata(new) != metadata:
                raise CheckpointError(f"{file} was left as it is: what would replace it doesn't read back as written")
            os.replace(new, file)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    sync_folder(file.parent)
