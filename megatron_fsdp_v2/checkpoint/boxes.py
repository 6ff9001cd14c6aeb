"""Reads chosen boxes of a checkpoint's tensors into chosen memory.

What a state dict can't say: that many tensors here are parts of one tensor there, as layers are that a checkpoint
stacks.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from .metadata import SafeFileSystemReader


@dataclass(frozen=True)
class Box:
    """A part of the saved tensor ``key``, from ``offsets`` on, and the memory of its shape to read it into.

    ``target`` has as many dimensions as the saved tensor; another dtype is converted to.
    """

    key: str
    offsets: tuple[int, ...]
    target: torch.Tensor


def read_boxes(path: Path, boxes: Sequence[Box], group: dist.ProcessGroup | None = None) -> None:
    """Fill every box from the checkpoint in the folder ``path``; a collective where there is a process group.

    Boxes without elements are passed over. Every key has to be a tensor in the checkpoint that the box lies in.

    Raises:
        CheckpointException: a file can't be read, on any rank.
    """
    load(
        {},
        storage_reader=SafeFileSystemReader(path),
        planner=_BoxPlanner([box for box in boxes if box.target.numel()]),
        process_group=group,
        no_dist=not dist.is_initialized(),
    )


class SavedChunks:
    """The chunks of one saved tensor, found by where they are along the dimensions that are cut into single indices.

    A tensor that stacks layers or experts has thousands, of which a box meets one.
    """

    def __init__(self, entry: TensorStorageMetadata) -> None:
        self._entry = entry
        single = 0
        while single < len(entry.size) and all(chunk.sizes[single] == 1 for chunk in entry.chunks):
            single += 1
        self._single = single
        self._chunks: dict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
        for chunk in entry.chunks:
            self._chunks[tuple(chunk.offsets[:single])].append(chunk)

    def read_items(self, box: Box) -> list[ReadItem]:
        """What DCP has to read for a box of this tensor."""
        wanted = ChunkStorageMetadata(torch.Size(box.offsets), box.target.shape)
        chunks = self._entry.chunks
        if all(size == 1 for size in wanted.sizes[: self._single]):
            chunks = self._chunks[tuple(wanted.offsets[: self._single])]
        items: list[ReadItem] = create_read_items_for_chunk_list(box.key, replace(self._entry, chunks=chunks), [wanted])
        return items


class _BoxPlanner(LoadPlanner):
    def __init__(self, boxes: Iterable[Box]) -> None:
        self._targets = {(box.key, torch.Size(box.offsets)): box for box in boxes}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        saved: dict[str, SavedChunks] = {}
        items: list[ReadItem] = []
        for box in self._targets.values():
            if box.key not in saved:
                entry = self._metadata.state_dict_metadata[box.key]
                assert isinstance(entry, TensorStorageMetadata)
                saved[box.key] = SavedChunks(entry)
            items += saved[box.key].read_items(box)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("boxes are parts of tensors")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        target = self._targets[index.fqn, index.offset].target.detach()
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Read straight into the target."""
