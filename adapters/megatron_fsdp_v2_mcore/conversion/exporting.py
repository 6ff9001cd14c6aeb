"""A v2 checkpoint becomes a folder as Hugging Face's libraries load it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_fsdp_v2.checkpoint.chunk_metadata import Chunk
from megatron_fsdp_v2.checkpoint.comparison import compare_shapes
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.inspection.contents import Checkpoint
from megatron_fsdp_v2.checkpoint.inspection.reading import TensorReader
from megatron_fsdp_v2.checkpoint.state_dict import MODEL_PREFIX

from .architecture import Architecture
from .hugging_face_config import FILE_NAME, config_of
from .names import FUSED_NORM, Link, links_of
from .output import fresh_folder, write_json
from .run_settings import architecture_of_settings
from .stored_settings import read_settings
from .tensor_folder import INDEX_NAME
from .values import in_dtype

# Calibration of low-precision kernels.
_EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes: the files in their order, each with its tensors, all of one dtype."""

    architecture: Architecture
    dtype: torch.dtype
    files: dict[str, list[Link]]

    @property
    def size(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(_size(link, self.dtype) for links in self.files.values() for link in links)


def plan_export(
    checkpoint: Checkpoint, dtype: torch.dtype | None, max_shard_size: int, vocabulary: int | None = None
) -> ExportPlan:
    """What is to be written, from metadata and settings alone.

    Args:
        dtype: of the files; by default bfloat16 if the run computed in it, float32 otherwise.
        max_shard_size: bytes of tensors in a file; what must stay together (query, key and value of a layer) may exceed
            that.
        vocabulary: number of tokens; see `architecture_of_settings`.

    Raises:
        ValueError: the shard size or the vocabulary is out of range.
        CheckpointError: the checkpoint isn't v2's, its model can't be converted, or its tensors aren't those that its
            settings say, listed.
    """
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size is {max_shard_size}; give a number of at least 1")
    architecture = architecture_of_settings(read_settings(checkpoint), vocabulary)
    # Before as many names are made.
    if architecture.layers > len(checkpoint.entries):
        raise CheckpointError(f"{checkpoint.path} has fewer tensors than layers ({architecture.layers:,})")
    links = links_of(architecture, fused_norms=f"{MODEL_PREFIX}{FUSED_NORM}" in checkpoint.entries)
    _judge(checkpoint, links)
    dtype = dtype or (torch.bfloat16 if architecture.bf16 else torch.float32)
    return ExportPlan(architecture, dtype, _files(links, dtype, max_shard_size))


def export(
    checkpoint: Checkpoint, plan: ExportPlan, out: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes the folder `out`, which has its name only once all is in it; one file's tensors at a time are in memory.

    Args:
        progress: called with the bytes written so far and those of all tensors.

    Raises:
        ValueError: there is something at `out`.
        CheckpointError: something can't be read or written, or doesn't fit into the dtype.
    """
    reader, done, places = TensorReader(checkpoint), 0, {}
    with fresh_folder(out) as folder:
        for file, links in plan.files.items():
            tensors: dict[str, torch.Tensor] = {}
            for link in links:
                tensors |= _converted(checkpoint, reader, link, plan.dtype)
                done += _size(link, plan.dtype)
                if progress is not None:
                    progress(done, plan.size)
            _save(tensors, folder / file)
            places |= dict.fromkeys(tensors, file)
        write_json(folder / INDEX_NAME, {"metadata": {"total_size": plan.size}, "weight_map": places})
        write_json(folder / FILE_NAME, config_of(plan.architecture, plan.dtype))


def _judge(checkpoint: Checkpoint, links: Sequence[Link]) -> None:
    if not any(key.startswith(MODEL_PREFIX) for key in checkpoint.entries):
        raise CheckpointError(f"{checkpoint.path} has no weights ({MODEL_PREFIX}...); it is no checkpoint of a v2 run")
    wanted = {f"{MODEL_PREFIX}{link.megatron}": link.shape for link in links}
    kept = {
        key: entry.shape
        for key, entry in checkpoint.entries.items()
        if key.startswith(MODEL_PREFIX) and not key.endswith(_EXTRA_STATE)
    }
    if differences := compare_shapes(wanted, kept, ("by its settings", "in the checkpoint")):
        raise CheckpointError(
            f"{checkpoint.path} does not hold the model that its settings describe:\n{differences.report()}"
        )


def _files(links: Sequence[Link], dtype: torch.dtype, limit: int) -> dict[str, list[Link]]:
    """Links in their order, as many in a file as fit."""
    groups: list[list[Link]] = [[]]
    size = 0
    for link in links:
        own = _size(link, dtype)
        if groups[-1] and size + own > limit:
            groups.append([])
            size = 0
        groups[-1].append(link)
        size += own
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, start=1)}


def _size(link: Link, dtype: torch.dtype) -> int:
    return sum(math.prod(shape) for shape in link.hugging_face.values()) * dtype.itemsize


def _converted(checkpoint: Checkpoint, reader: TensorReader, link: Link, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    whole = reader.read(checkpoint.entries[f"{MODEL_PREFIX}{link.megatron}"], Chunk((0,) * len(link.shape), link.shape))
    try:
        # Memory of its own: a file can't hold two views of one.
        parts = [in_dtype(part, dtype) for part in link.split(whole)]
    except ValueError as error:
        raise CheckpointError(f"{MODEL_PREFIX}{link.megatron} of {checkpoint.path}: {error}") from error
    return dict(zip(link.hugging_face, parts, strict=True))


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{file} can't be written: {error}") from error
    # The library gives its files to the owner alone; the folder has what the user wants.
    file.chmod(file.parent.stat().st_mode & 0o666)
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
