"""Model, optimizers and extra state as one flat state dict for DCP, on their own memory. No communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.tensor import DTensor

from . import extra_state, group_options
from .agreement import Offer
from .chunk_metadata import attach_chunk_metadata, chunk_metadata_of, verify_chunks
from .extra_state import Path
from .fused import split_states, split_weights
from .module_loading import hand_over
from .optimizer_state import STATE_PREFIX, State, collect_state, create_state, keys_that_may_lack, saved_states
from .subject import Subject, bare_name

MODEL_PREFIX = "model."


class StateKey(NamedTuple):
    """Whose optimizer state a key is of."""

    parameter: nn.Parameter
    state: str


@dataclass(frozen=True)
class StateDict:
    """Values by key, as DCP names them, and what each key stands for.

    ``paths`` leads to each key's place in a nested state dict; ``objects`` lists the optimizer states without tensors.
    """

    flat: dict[str, Any]
    paths: dict[str, Path]
    objects: dict[str, StateKey]

    def part(self, first: str) -> dict[Path, Any]:
        """The values below ``model``, ``optimizer`` or ``extra`` by the rest of their paths."""
        return {path[1:]: self.flat[key] for key, path in self.paths.items() if path[0] == first}


def build_state_dict(subject: Subject, extra: Mapping[Path, Any]) -> StateDict:
    """The state dict of what there is now.

    Raises:
        ChunkError: what this rank holds of some tensors isn't known.
        ValueError: optimizer state has another shape than its parameter, or is of a kind that can't be saved.
    """
    paths: dict[Path, Any] = {}
    for name, value in _weights(subject).items():
        paths["model", name] = value
    names = subject.names()
    states = _states(subject, names)
    for name, values in split_states(states, subject.fused).items():
        for state, value in values.items():
            paths["optimizer", "state", name, state] = value
    if subject.optimizers:
        paths["optimizer", "param_groups"] = group_options.options_text(subject.optimizers, names)
    for path, value in extra.items():
        paths[extra_state.ROOT, *path] = _with_chunks(value)
    state_dict = StateDict(
        flat={".".join(path): value for path, value in paths.items()},
        paths={".".join(path): path for path in paths},
        objects=_objects(states, names),
    )
    if len(state_dict.flat) < len(paths):
        raise ValueError(f"two values would have one key: {_first_twice(paths)!r}")
    verify_chunks(state_dict.flat)
    return state_dict


def offer_of(subject: Subject) -> Callable[[StateDict], Offer]:
    """What the ranks have to agree on. State of parameters they hold nothing of may be missing."""
    parameters = {name: parameter for parameter, name in subject.names().items()}
    may_lack = keys_that_may_lack(parameters, subject.fused)
    return lambda state_dict: Offer(state_dict.flat, may_lack)


@contextmanager
def missing_state_created(subject: Subject, metadata: Metadata) -> Iterator[None]:
    """Gives parameters without optimizer state what a checkpoint has for them, without a step.

    What is raised inside takes it away again.
    """
    names = subject.names()
    shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
    saved = saved_states(metadata, shapes, subject.fused)
    objects = _saved_objects(metadata)
    created = []
    for optimizer in subject.optimizers:
        bare = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)]
        create_state(optimizer, names, saved)
        for parameter in bare:
            created.append((optimizer, parameter))
            if found := objects.get(names[parameter]):
                optimizer.state[parameter] = {**optimizer.state.get(parameter, {}), **dict.fromkeys(found, 0)}
    try:
        yield
    except BaseException:
        for optimizer, parameter in created:
            optimizer.state.pop(parameter, None)
        raise


def take_over(subject: Subject, state_dict: StateDict, is_loaded: Callable[[str], bool]) -> None:
    """Puts what was loaded where loading in place doesn't reach, and lets the next forward see the weights."""
    for key, (parameter, state) in state_dict.objects.items():
        if is_loaded(key):
            optimizer = next(o for o in subject.optimizers if parameter in o.state)
            optimizer.state[parameter][state] = state_dict.flat[key]
    loaded = {
        key.removeprefix(MODEL_PREFIX): value
        for key, value in state_dict.flat.items()
        if key.startswith(MODEL_PREFIX) and is_loaded(key)
    }
    hand_over(subject.model, loaded)
    subject.mark_loaded()


def _weights(subject: Subject) -> dict[str, Any]:
    state = {bare_name(name): _with_chunks(value) for name, value in subject.model.state_dict().items()}
    return split_weights(state, subject.fused)


def _states(subject: Subject, names: Mapping[nn.Parameter, str]) -> State:
    states: State = {}
    for optimizer in subject.optimizers:
        states |= collect_state(optimizer, names)
    for name, values in states.items():
        for state, value in values.items():
            if not isinstance(value, (torch.Tensor, bool, int, float, str)):
                raise ValueError(
                    f"optimizer state {state!r} of {name!r} is a {type(value).__name__}: only tensors, numbers and "
                    "strings can be saved"
                )
    return states


def _objects(states: State, names: Mapping[nn.Parameter, str]) -> dict[str, StateKey]:
    parameters = {name: parameter for parameter, name in names.items()}
    return {
        f"{STATE_PREFIX}{name}.{state}": StateKey(parameters[name], state)
        for name, values in states.items()
        for state, value in values.items()
        if not isinstance(value, torch.Tensor)
    }


def _saved_objects(metadata: Metadata) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if key.startswith(STATE_PREFIX) and isinstance(entry, BytesStorageMetadata):
            name, _, state = key.removeprefix(STATE_PREFIX).rpartition(".")
            found.setdefault(name, []).append(state)
    return found


def _with_chunks(value: Any) -> Any:
    if isinstance(value, DTensor) and chunk_metadata_of(value) is None:
        return attach_chunk_metadata(value, "preprocess")
    return value


def _first_twice(paths: Mapping[Path, Any]) -> str:
    keys = [".".join(path) for path in paths]
    return next(key for index, key in enumerate(keys) if key in keys[:index])
