"""Loads a stock `torch_dist` checkpoint straight into the shards of a v2 run, without a copy of it in between."""

from __future__ import annotations

import functools
import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.checkpoint.boxes import Box, read_boxes
from megatron_fsdp_v2.checkpoint.chunk_metadata import local_chunk
from megatron_fsdp_v2.checkpoint.collective_errors import causes_of, on_every_rank
from megatron_fsdp_v2.checkpoint.comparison import Differences
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.metadata import SafeFileSystemReader, read_metadata
from megatron_fsdp_v2.checkpoint.optimizer_state import SavedState

from ..optimizer import FSDPv2DistributedOptimizer
from .logical import Piece, logical_pieces
from .optimizer_entry import GROUPS, SCALER, STATE

_OPTIMIZER = "optimizer."
_STATE = "optimizer.state."
# The fp32 weights of mixed-precision training, of which the model's own are roundings.
_MAIN_WEIGHT = "param"
_STEP = "step"
# What stock keeps beside tensors, and calibrations that every run makes anew.
_OBJECTS = ("rng_state", "rerun_state_machine_state", "common_state")
_EXTRA_STATE = "_extra_state"


def load_torch_dist(
    path: Path,
    state_dict: Mapping[str, Any],
    model: nn.Module,
    optimizer: FSDPv2DistributedOptimizer | None,
) -> dict[str, Any]:
    """Fills what stock's `generate_state_dict` gathered for loading from a checkpoint with other keys and shapes.

    Weights are the optimizer's fp32 ones where the optimizer is loaded too.

    Raises:
        CheckpointError: keys are missing or left over, or shapes differ, listed before anything is loaded; the
            optimizer state is of a kind that belongs to stock's buffers; or a file can't be read. On every rank.
    """
    common = on_every_rank(functools.partial(dist_checkpointing.load_common_state_dict, str(path)))
    conversion = on_every_rank(functools.partial(_convert, path, state_dict, model, optimizer, common))
    try:
        read_boxes(path, conversion.boxes)
    except CheckpointException as error:
        raise CheckpointError(
            f"{path} could not be loaded ({causes_of(error)}); this run's weights are partly overwritten"
        ) from error
    loaded = {**common, "model": state_dict["model"]}
    if conversion.groups is not None:
        loaded["optimizer"] = {STATE: {}, GROUPS: json.dumps(conversion.groups), **_scaler(common)}
    if "rng_state" in state_dict:
        loaded["rng_state"] = conversion.random_states or state_dict["rng_state"]
    return loaded


@dataclass(frozen=True)
class _Conversion:
    boxes: list[Box]
    groups: list[dict[str, Any]] | None
    random_states: dict[str, Any] | None


def _convert(
    path: Path,
    state_dict: Mapping[str, Any],
    model: nn.Module,
    optimizer: FSDPv2DistributedOptimizer | None,
    common: Mapping[str, Any],
) -> _Conversion:
    """What to read where. Creates the optimizer state there is to be; everything else is unchanged."""
    metadata = read_metadata(path)
    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    pieces = logical_pieces(model, {**content, "dp_cp_group": group})
    groups = None
    tensors = {"": dict(state_dict["model"])}
    if "optimizer" in state_dict:
        assert optimizer is not None
        _refuse_buffer_space(path, metadata)
        groups = _saved_groups(path, common)
        tensors |= _optimizer_tensors(optimizer, pieces, metadata)
        _set_steps(optimizer, groups)
        if any(key.startswith(f"{_STATE}{_MAIN_WEIGHT}.") for key in metadata.state_dict_metadata):
            tensors = {f"{_STATE}{_MAIN_WEIGHT}.": tensors.pop(""), **tensors}
    _judge(path, pieces, tensors, metadata)
    boxes = [box for prefix, named in tensors.items() for box in _boxes(prefix, named, pieces, metadata)]
    random_states = _random_states(path, metadata) if "rng_state" in state_dict else None
    return _Conversion(boxes, groups, random_states)


def _optimizer_tensors(
    optimizer: FSDPv2DistributedOptimizer, pieces: list[Piece], metadata: Metadata
) -> dict[str, dict[str, torch.Tensor]]:
    """The state to fill: per prefix of the checkpoint's keys, by parameter name."""
    shapes = {name: tuple(p.shape) for name, p in optimizer.named_parameters().items()}
    kinds = {
        key.removeprefix(_STATE).partition(".")[0]
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(_STATE) and isinstance(entry, TensorStorageMetadata)
    } - {_MAIN_WEIGHT}
    saved: dict[str, dict[str, SavedState]] = {}
    for piece in pieces:
        for kind in kinds:
            entry = metadata.state_dict_metadata.get(f"{_STATE}{kind}.{piece.key}")
            if piece.name in shapes and isinstance(entry, TensorStorageMetadata):
                state = SavedState(shapes[piece.name], entry.properties.dtype)
                saved.setdefault(piece.name, {_STEP: SavedState((), torch.float32)})[kind] = state
    optimizer.create_missing_state(saved)
    states = optimizer.sharded_state_dict()[STATE]
    return {
        f"{_STATE}{kind}.": {name: values[kind] for name, values in states.items() if kind in values}
        for kind in sorted(kinds)
    }


def _set_steps(optimizer: FSDPv2DistributedOptimizer, groups: list[dict[str, Any]]) -> None:
    """Torch's optimizers count steps for every parameter, stock's checkpoints for every group."""
    steps = {group.pop(_STEP) for group in groups if _STEP in group} or {0}
    if len(steps) > 1:
        raise CheckpointError(f"the parameter groups of the checkpoint made different numbers of steps: {steps}")
    (step,) = steps
    for values in optimizer.sharded_state_dict()[STATE].values():
        if isinstance(values.get(_STEP), torch.Tensor):
            values[_STEP].fill_(step)
    if hasattr(optimizer.optimizer, "initialize_state"):
        for group in groups:
            group[_STEP] = int(step)


def _judge(path: Path, pieces: list[Piece], tensors: Mapping[str, Mapping[str, Any]], metadata: Metadata) -> None:
    """Every tensor has to have a whole counterpart, and every tensor of the checkpoint that is read one here."""
    entries = metadata.state_dict_metadata
    missing, reshaped, used = [], [], set()
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    for prefix, named in tensors.items():
        for name in named:
            if name.endswith(_EXTRA_STATE):
                continue
            keys = {f"{prefix}{piece.key}": piece for piece in by_name.get(name, [])}
            missing += [name] if not keys else [key for key in keys if key not in entries]
            for key, piece in keys.items():
                used.add(key)
                saved = entries.get(key)
                if isinstance(saved, TensorStorageMetadata) and not _fits(tuple(saved.size), piece):
                    reshaped.append(f"{key}: {tuple(saved.size)} in the checkpoint, {piece.shape} here")
    differences = Differences(
        tuple(dict.fromkeys(missing)), tuple(_unused(metadata, used, tensors)), tuple(dict.fromkeys(reshaped))
    )
    if differences:
        raise CheckpointError(
            f"{path} does not fit this run:\n{differences.report()}\n"
            "the model has to be the one that was saved; --no-load-optim leaves the optimizer out"
        )


def _unused(metadata: Metadata, used: set[str], tensors: Mapping[str, Any]) -> Iterator[str]:
    with_optimizer = len(tensors) > 1
    weights_of_optimizer = "" not in tensors
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata) or key in used or _EXTRA_STATE in key:
            continue
        if key.startswith(_OPTIMIZER):
            if with_optimizer:
                yield key
        elif not key.startswith(_OBJECTS) and not (weights_of_optimizer and f"{_STATE}{_MAIN_WEIGHT}.{key}" in used):
            yield key


def _fits(saved: tuple[int, ...], piece: Piece) -> bool:
    if not piece.may_be_padded:
        return saved == piece.shape
    rows = piece.leading
    return saved[:rows] + saved[rows + 1 :] == piece.shape[:rows] + piece.shape[rows + 1 :]


def _boxes(prefix: str, named: Mapping[str, torch.Tensor], pieces: list[Piece], metadata: Metadata) -> Iterator[Box]:
    """The parts of every piece that this rank holds."""
    for piece in pieces:
        tensor = named.get(piece.name)
        if tensor is None:
            continue
        key = f"{prefix}{piece.key}"
        saved = metadata.state_dict_metadata[key]
        assert isinstance(saved, TensorStorageMetadata)
        local, first = _local_rows(tensor)
        start = max(piece.first, first)
        stop = min(piece.first + piece.rows, first + local.shape[0])
        offsets = list(piece.offsets)
        if tensor.ndim:
            offsets[piece.leading] += start - piece.first
            stop = min(stop, start + saved.size[piece.leading] - offsets[piece.leading])
        if start < stop:
            rows = local[start - first : stop - first]
            rows = rows if tensor.ndim else rows[0]
            yield Box(key, tuple(offsets), rows[(None,) * piece.leading])


def _local_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What this rank holds of a tensor and the row it begins with; a tensor without dimensions as one row."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor, local_chunk(tensor).offsets[0]
    return (tensor if tensor.ndim else tensor[None]), 0


def _refuse_buffer_space(path: Path, metadata: Metadata) -> None:
    if any(key.startswith("optimizer.distributed.") for key in metadata.state_dict_metadata):
        raise CheckpointError(
            f"{path} has optimizer state as stock's buffers lay it out (dp_reshardable), which only stock can take "
            "apart: save it once more with --dist-ckpt-optim-fully-reshardable, or give --no-load-optim"
        )
    if not any(key.startswith(_STATE) for key in metadata.state_dict_metadata):
        raise CheckpointError(f"{path} has no optimizer state: give --no-load-optim to load the weights alone")


def _saved_groups(path: Path, common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of all of stock's optimizers, of which it has one for experts, with the step where torch keeps it."""
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, **_common_step(owner)}
        for owner in _mappings_with("param_groups", common.get("optimizer"))
        for group in owner["param_groups"]
    ]
    if not groups:
        raise CheckpointError(f"{path} has no options of the optimizer: give --no-load-optim")
    return groups


def _mappings_with(key: str, value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if key in value:
            yield value
        else:
            for item in value.values():
                yield from _mappings_with(key, item)


def _scaler(common: Mapping[str, Any]) -> dict[str, Any]:
    for owner in _mappings_with(SCALER, common.get("optimizer")):
        return {SCALER: owner[SCALER]}
    return {}


def _common_step(owner: Mapping[str, Any]) -> dict[str, Any]:
    state = owner.get("state")
    step = state.get("common_step") if isinstance(state, Mapping) else None
    return {} if step is None else {_STEP: float(step)}


def _random_states(path: Path, metadata: Metadata) -> dict[str, Any] | None:
    """The random states of the only pipeline stage and tensor-parallel rank, if they were saved."""
    key = "rng_state/shard_0.0_1.1"
    if key not in metadata.state_dict_metadata:
        if os.environ.get("RANK", "0") == "0":
            warnings.warn(f"{path} has no random states for this layout; they are left as they are", stacklevel=2)
        return None
    entry: dict[str, Any] = {key: io.BytesIO()}
    load(entry, storage_reader=SafeFileSystemReader(path), no_dist=True)
    states = entry[key]
    if isinstance(states, io.BytesIO):
        states.seek(0)
        # Stock writes Python's and NumPy's states there. Loading a run trusts its checkpoint, as stock's loading does.
        states = torch.load(states, weights_only=False)
    # One entry per object of that key, and in it one per rank whose states were kept.
    (per_rank,) = states
    return {"(0, 0)": per_rank}
