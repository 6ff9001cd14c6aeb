"""Checkpoints of torch training runs: one call to save, one to load, on any number of ranks or without any."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..arguments import check_flag
from . import extra_state, group_options
from .agreement import build_alike
from .collective_errors import causes_of, on_every_rank, on_rank_zero
from .comparison import Differences, compare
from .errors import CheckpointError
from .files import FlatSavePlanner, NamingWriter, check_objects
from .fused import FusedLayout
from .metadata import SafeFileSystemReader, read_metadata
from .optimizer_state import STATE_PREFIX
from .state_dict import MODEL_PREFIX, StateDict, build_state_dict, missing_state_created, offer_of, take_over
from .storage import begin_write, cancel_write, end_write, find_readable, open_readable
from .stored_objects import SafeLoadPlanner
from .subject import Optimizers, Subject


def save_checkpoint(
    model: nn.Module,
    optimizer: Optimizers,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    fused: Mapping[str, FusedLayout] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save weights, buffers, optimizer state and options as a DCP checkpoint in the folder ``path``; a collective.

    A whole checkpoint that the folder holds is kept until the new one is whole, wherever the save is interrupted. All
    ranks see one folder. Every rank writes what it holds; what several hold is written by one of them, so buffers and
    ``extra`` have to be alike on all.

    Args:
        model: sharded by `fully_shard` or not.
        optimizer: one over parameters of the model, a list of several, or None to save the weights alone.
        extra: a nested dict, the same keys on all ranks, of numbers, strings, tensors, containers of these, and objects
            with ``state_dict`` and ``load_state_dict``.
        fused: the matrices in parameters that hold several, by parameter name. Each is saved by itself.
        process_group: the ranks that hold the model; by default all. Ignored without a process group.

    Raises:
        TypeError, ValueError: an argument can't be saved; before any communication.
        CheckpointError: on all ranks: they would save different keys, or a file can't be written. The message names it
            and what is intact.
    """
    subject = Subject.of(model, optimizer, fused)
    extra_state.check_extra(extra)
    folder = Path(path)
    on_rank_zero(partial(begin_write, folder), process_group)
    try:
        state_dict = build_alike(partial(_to_save, subject, extra or {}), offer_of(subject), process_group)
    except CheckpointError:
        if not dist.is_initialized() or dist.get_rank(process_group) == 0:
            cancel_write(folder)
        raise
    try:
        with _no_word_on_single_processes():
            save(
                state_dict.flat,
                storage_writer=NamingWriter(folder),
                planner=FlatSavePlanner(state_dict.paths),
                process_group=process_group,
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        raise CheckpointError(f"{folder} could not be saved ({causes_of(error)}); {_intact(folder)}") from error
    on_rank_zero(partial(end_write, folder), process_group)


def load_checkpoint(
    model: nn.Module,
    optimizer: Optimizers,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    fused: Mapping[str, FusedLayout] | None = None,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Load what `save_checkpoint` saved, in place; a collective. Number of ranks, strategy and mesh may be others.

    Optimizer state that isn't there yet is made without a step. Options of groups are found by the names of their
    parameters. The next forward computes with the loaded weights. Nothing in the checkpoint is executed.

    Args:
        model, optimizer, fused, process_group: as for `save_checkpoint`. Without an optimizer the weights are loaded.
        extra: objects with ``load_state_dict`` to load into, and tensors to load into their place, under the keys that
            they were saved by. What isn't given is returned all the same, tensors on the CPU and whole.
        strict: whether keys that only the checkpoint or only this run has are an error. If not they are listed in a
            warning, and what is missing keeps its values.

    Returns:
        The extra state, as nested as it was saved; states in place of objects.

    Raises:
        TypeError, ValueError: an argument can't be loaded into; before any communication.
        CheckpointError: on all ranks: the checkpoint isn't whole, doesn't fit, or needs code to be run. Nothing was
            changed, unless the message says so.
    """
    subject = Subject.of(model, optimizer, fused)
    extra_state.check_extra(extra)
    check_flag("strict", strict)
    known: list[Metadata] = []
    folder = on_rank_zero(partial(_find, Path(path), known), process_group)
    with ExitStack() as created:
        # What is raised on any rank takes away the state that was created.
        prepare = partial(_to_load, subject, extra or {}, folder, known, strict, created)
        state_dict, options = on_every_rank(prepare, process_group)
    (metadata,) = known
    loaded = {key: value for key, value in state_dict.flat.items() if key in metadata.state_dict_metadata}
    try:
        _read(folder, metadata, loaded, process_group)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; the model's weights may be partly overwritten") from error
    state_dict.flat.update(loaded)
    take_over(subject, state_dict, loaded.__contains__)
    group_options.restore_options(options)
    result = extra_state.nested({p: v for p, v in state_dict.part(extra_state.ROOT).items() if _key(p) in loaded})
    extra_state.restore_objects(extra or {}, result)
    return result


def _to_save(subject: Subject, extra: Mapping[str, Any]) -> StateDict:
    state_dict = build_state_dict(subject, extra_state.flatten(extra))
    check_objects(state_dict.flat)
    return state_dict


def _find(path: Path, known: list[Metadata]) -> Path:
    """The folder to read; its metadata, which is large, is kept here and read by every rank."""
    folder, metadata = open_readable(path)
    known.append(metadata)
    return folder


def _to_load(
    subject: Subject,
    extra: Mapping[str, Any],
    folder: Path,
    known: list[Metadata],
    strict: bool,
    created: ExitStack,
) -> tuple[StateDict, group_options.Matched]:
    """The state dict to load, and options for the groups, once it is sure that they fit."""
    if not known:
        known.append(read_metadata(folder))
    (metadata,) = known
    created.enter_context(missing_state_created(subject, metadata))
    given = extra_state.flatten(extra)
    places = {**given, **extra_state.places_for(metadata, given)}
    state_dict = build_state_dict(subject, places)
    parts = (MODEL_PREFIX, STATE_PREFIX) if subject.optimizers else (MODEL_PREFIX,)
    _judge(folder, compare(state_dict.flat, metadata, lambda key: key.startswith(parts)), strict)
    options: group_options.Matched = []
    if group_options.KEY in state_dict.flat and group_options.KEY in metadata.state_dict_metadata:
        stored = {group_options.KEY: ""}
        _read(folder, metadata, stored, alone=True)
        options = group_options.match_options(stored[group_options.KEY], subject.optimizers, subject.names(), strict)
    return state_dict, options


def _read(
    folder: Path,
    metadata: Metadata,
    flat: dict[str, Any],
    group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> None:
    try:
        with _no_word_on_single_processes():
            load(
                flat,
                storage_reader=SafeFileSystemReader(folder, metadata),
                planner=SafeLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=group,
                no_dist=alone or not dist.is_initialized(),
            )
    except CheckpointException as error:
        raise CheckpointError(f"{folder} could not be loaded ({causes_of(error)})") from error


def _judge(folder: Path, differences: Differences, strict: bool) -> None:
    if not differences:
        return
    report = f"{folder} does not fit:\n{differences.report()}"
    if differences.reshaped or strict:
        raise CheckpointError(f"{report}\n{_remedy(differences)}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(f"{report}\nwhat is missing keeps its values", stacklevel=2)


def _remedy(differences: Differences) -> str:
    if differences.missing and all(key.startswith("optimizer.") for key in differences.missing):
        return "give no optimizer to load the weights alone"
    if differences.reshaped:
        return "the model has to be that of the checkpoint"
    return "strict=False loads what both have"


def _intact(folder: Path) -> str:
    try:
        return f"the checkpoint before is whole: {find_readable(folder)}"
    except CheckpointError:
        return "there was no whole checkpoint at this path before; others are as they were"


def _key(path: extra_state.Path) -> str:
    return ".".join((extra_state.ROOT, *path))


@contextmanager
def _no_word_on_single_processes() -> Iterator[None]:
    """DCP warns of what is meant here: that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"torch\.distributed is (disabled|unavailable)")
        yield
