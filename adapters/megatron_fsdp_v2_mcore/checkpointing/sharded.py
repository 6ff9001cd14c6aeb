"""Loads a checkpoint of a sharded run into the shards of another, in place and strictly."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_v2.checkpoint.collective_errors import causes_of, on_every_rank
from megatron_fsdp_v2.checkpoint.comparison import Differences, compare
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.metadata import SafeFileSystemReader, read_metadata
from megatron_fsdp_v2.checkpoint.optimizer_state import STATE_PREFIX, SavedState, saved_states

from ..optimizer import FSDPv2DistributedOptimizer
from .contents import prepare
from .fused_parameters import fused_layouts
from .optimizer_entry import SCALER

_SCALER = f"optimizer.{SCALER}"
_RANDOM = "rng_state"
# What a run knows beside its tensors. Files with weights alone have none of it; the run then starts at iteration 0.
_FACTS: dict[str, Any] = {"args": None, "iteration": 0, "checkpoint_version": 3.0}
# Saved by stock, but not asked for when it loads.
_OPERATIONS = "num_floating_point_operations_so_far"


def load_facts(path: Path) -> dict[str, Any]:
    """The settings, iteration and version of the run that saved a checkpoint, as far as it has them.

    Settings are a pickle, which this runs, as every load of a run does. No communication.
    """
    entries = read_metadata(path).state_dict_metadata
    facts = {key: value for key, value in _FACTS.items() if key in entries}
    dcp.load(facts, storage_reader=SafeFileSystemReader(path), no_dist=True)
    return facts


def load_sharded(
    path: Path,
    state_dict: Mapping[str, Any],
    model: nn.Module,
    optimizer: FSDPv2DistributedOptimizer | None,
    args: Any,
) -> dict[str, Any]:
    """Fills what stock's `generate_state_dict` gathered for loading; returns it with the objects that were loaded.

    Raises:
        CheckpointError: keys are missing or left over, or shapes differ, listed before anything is loaded; or a file
            can't be read. The same on every rank.
    """
    strict = bool(args.strict_fsdp_dtensor_load)
    build = functools.partial(_build, path, state_dict, model, optimizer, strict)
    wanted, prepared = on_every_rank(build)
    try:
        dcp.load(
            prepared,
            storage_reader=SafeFileSystemReader(path),
            planner=DefaultLoadPlanner(allow_partial_load=not strict),
        )
    except CheckpointException as error:
        raise CheckpointError(
            f"{path} could not be loaded ({causes_of(error)}); this run's weights are partly overwritten"
        ) from error
    loaded = {**prepared, "model": wanted["model"]}
    for key in ("iteration", "checkpoint_version"):
        loaded.setdefault(key, _FACTS[key])
    if "optimizer" in wanted:
        loaded["optimizer"] = {**prepared["optimizer"], "state": wanted["optimizer"]["state"]}
    if _RANDOM in state_dict:
        loaded.setdefault(_RANDOM, state_dict[_RANDOM])
    return loaded


def _build(
    path: Path,
    state_dict: Mapping[str, Any],
    model: nn.Module,
    optimizer: FSDPv2DistributedOptimizer | None,
    strict: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is wanted as the run knows it, and the same as DCP is to load it."""
    metadata = read_metadata(path)
    entries = metadata.state_dict_metadata
    wanted = {
        key: value for key, value in state_dict.items() if key != "_model" and (key not in _FACTS or key in entries)
    }
    if "optimizer" in wanted:
        assert optimizer is not None
        optimizer.create_missing_state(_saved_states(metadata, model))
        wanted["optimizer"] = optimizer.sharded_state_dict()
        if f"{_SCALER}.scale" not in entries and wanted["optimizer"].pop(SCALER, None):
            _warn(f"{path} has no loss scale; it starts anew")
    if _OPERATIONS in entries:
        wanted[_OPERATIONS] = 0
    if _RANDOM in wanted and not _has_all(metadata, wanted[_RANDOM]):
        _warn(f"{path} has no random states for this number of ranks; theirs are left as they are")
        del wanted[_RANDOM]
    prepared = prepare(wanted, model)
    flat, _ = flatten_state_dict(prepared)
    _judge(path, compare(flat, metadata, _wanted_in(prepared)), strict)
    return wanted, prepared


def _saved_states(metadata: Metadata, model: nn.Module) -> dict[str, dict[str, SavedState]]:
    """What a checkpoint holds of the optimizer, by the names that the parameters of this model have."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return saved_states(metadata, shapes, fused_layouts(model))


def _wanted_in(prepared: Mapping[str, Any]) -> Callable[[str], bool]:
    """Of keys that only the checkpoint has, those that should have had a place: weights, and state if it is loaded."""
    parts = ("model.", STATE_PREFIX) if "optimizer" in prepared else ("model.",)
    return lambda key: key.startswith(parts)


def _has_all(metadata: Metadata, random_states: Any) -> bool:
    flat, _ = flatten_state_dict({_RANDOM: random_states})
    return all(key in metadata.state_dict_metadata for key in flat)


def _judge(path: Path, differences: Differences, strict: bool) -> None:
    if not differences:
        return
    report = f"{path} does not fit this run:\n{differences.report()}"
    if differences.reshaped or strict:
        raise CheckpointError(f"{report}\n{_remedy(differences)}")
    _warn(f"{report}\nwhat is missing keeps its values")


def _remedy(differences: Differences) -> str:
    missing = differences.missing
    if missing and all(key.startswith(("optimizer.", "opt_param_scheduler.")) for key in missing):
        return "give --no-load-optim to load the weights alone"
    if differences.reshaped:
        return "the model's size has to be that of the checkpoint"
    return "give --no-strict-fsdp-dtensor-load to load what both have"


def _warn(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(text, stacklevel=2)
