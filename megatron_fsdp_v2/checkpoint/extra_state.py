"""What users save beside model and optimizer: nested dicts with tensors, plain values, and objects that have state.

Every tensor gets a key of its own, whatever holds none is one object: keys of dicts that aren't strings stay what they
are, and a sharded tensor is saved by those who hold its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from .errors import CheckpointError

ROOT = "extra"
type Path = tuple[str, ...]


def check_extra(extra: Any) -> None:
    """Refuses what can't be saved or loaded as extra state.

    Raises:
        TypeError: it is no dict, or has keys that aren't strings.
    """
    if extra is None:
        return
    if not isinstance(extra, Mapping):
        raise TypeError(f"extra must be a dict, got {type(extra).__name__}")
    if wrong := [key for key in extra if not isinstance(key, str)]:
        raise TypeError(f"extra must have strings as keys, got {wrong[0]!r}")


def flatten(extra: Mapping[str, Any]) -> dict[Path, Any]:
    """The tensors and objects of an extra state by path. Objects with ``state_dict`` are what that returns.

    Raises:
        ValueError: a sharded tensor is where no key names it.
    """
    flat: dict[Path, Any] = {}
    for key, value in _states(extra).items():
        flat |= dict(_leaves((key,), value))
    return flat


def saved_paths(metadata: Metadata) -> dict[str, Path]:
    """The keys of extra state in a checkpoint, with their paths.

    Raises:
        CheckpointError: the checkpoint contradicts itself about them.
    """
    data = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    paths: dict[str, Path] = {}
    for key in metadata.state_dict_metadata:
        if not key.startswith(f"{ROOT}."):
            continue
        path = data.get(key)
        # Others than `save_checkpoint` may have written it, flat.
        if not isinstance(path, tuple) or path[:1] != (ROOT,) or not all(type(part) is str for part in path):
            path = (ROOT, key.removeprefix(f"{ROOT}."))
        paths[key] = path[1:]
    taken = set(paths.values())
    if clash := [key for key, path in paths.items() if any(path[:end] in taken for end in range(1, len(path)))]:
        raise CheckpointError(f"{clash[0]} is inside of another entry")
    return paths


def places_for(metadata: Metadata, given: Mapping[Path, Any]) -> dict[Path, Any]:
    """Where to load the extra state of a checkpoint to: tensors of the state at hand, or new ones on the CPU."""
    places: dict[Path, Any] = {}
    for key, path in saved_paths(metadata).items():
        entry = metadata.state_dict_metadata[key]
        if path in given:
            places[path] = given[path]
        elif isinstance(entry, TensorStorageMetadata):
            places[path] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            places[path] = None
    return places


def nested(flat: Mapping[Path, Any]) -> dict[str, Any]:
    """The opposite of `flatten`."""
    result: dict[str, Any] = {}
    for path, value in flat.items():
        place = result
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
    return result


def restore_objects(extra: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Gives every object in ``extra`` that has ``load_state_dict`` what was loaded in its place."""
    for key, value in extra.items():
        if key not in loaded:
            continue
        if _has_state(value):
            value.load_state_dict(loaded[key])
        elif isinstance(value, Mapping):
            restore_objects(value, loaded[key])


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif (
        isinstance(value, Mapping)
        and next(_tensors(value), None) is not None
        and all(isinstance(key, str) for key in value)
    ):
        for key, item in value.items():
            yield from _leaves((*path, key), item)
    else:
        if sharded := [tensor for tensor in _tensors(value) if isinstance(tensor, DTensor)]:
            raise ValueError(
                f"{'.'.join((ROOT, *path))} has a sharded tensor of shape {tuple(sharded[0].shape)} in a list or under "
                "a key that is no string: put it into a dict, under a string"
            )
        yield path, value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _tensors(item)


def _states(value: Any) -> Any:
    """With states in the place of objects that have one."""
    if _has_state(value):
        return value.state_dict()
    return {key: _states(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
