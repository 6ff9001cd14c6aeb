"""Boxes of stored tensors, read without reading more of a file than they need."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ..boxes import Box, SavedChunks
from ..chunk_metadata import Chunk
from ..errors import CheckpointError
from ..metadata import SafeFileSystemReader
from .contents import Checkpoint, Entry


@dataclass(frozen=True)
class _Place:
    """Where the elements of a stored tensor are: the file's byte of its storage, then as in `torch.as_strided`."""

    byte: int
    first: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class WindowReader(SafeFileSystemReader):
    """DCP's reader, except that it reads no more of a tensor than from the first to the last wanted element."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path)
        self.set_up_storage_reader(checkpoint.metadata, is_coordinator=True)
        self._places: dict[MetadataIndex, _Place | None] = {}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for into the planner's tensors.

        Raises:
            CheckpointError: a file is missing, damaged, or doesn't hold what the metadata says.
        """
        rest = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO or not self._read_window(item, planner):
                rest.append(item)
        return super().read_data(replace(plan, items=rest), planner)

    def _read_window(self, item: ReadItem, planner: LoadPlanner) -> bool:
        """Whether that was possible. It isn't for what is compressed or of an old format."""
        info: _StorageInfo = self.storage_data[item.storage_index]
        if info.transform_descriptors:
            return False
        with self.fs.create_stream(self.fs.concat_path(self.path, info.relative_path), "rb") as stream:
            if item.storage_index not in self._places:
                self._places[item.storage_index] = _find(self._slice_file(stream, info), info.offset)
            place = self._places[item.storage_index]
            if place is None:
                return False
            window = _read(stream, place, tuple(item.storage_offsets), tuple(item.lengths))
        target = planner.resolve_tensor(item)
        target.copy_(window)
        planner.commit_tensor(item, target)
        return True


def _find(stream: Any, offset: int) -> _Place | None:
    with FakeTensorMode():
        tensor = torch.load(stream, map_location="cpu", weights_only=True)
    byte = getattr(tensor.untyped_storage(), "_checkpoint_offset", None) if type(tensor) is FakeTensor else None
    if byte is None or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    return _Place(offset + byte, tensor.storage_offset(), tensor.stride(), tuple(tensor.shape), tensor.dtype)


def _read(stream: Any, place: _Place, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    if any(start + size > full for start, size, full in zip(offsets, sizes, place.shape, strict=True)):
        raise CheckpointError(f"the file has a tensor of shape {place.shape} there, not what the metadata says")
    first = place.first + sum(start * stride for start, stride in zip(offsets, place.strides, strict=True))
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, place.strides, strict=True))
    buffer = bytearray(span * place.dtype.itemsize)
    stream.seek(place.byte + first * place.dtype.itemsize)
    if stream.readinto(buffer) != len(buffer):
        raise CheckpointError("the file ends too early")
    return torch.frombuffer(buffer, dtype=torch.uint8).view(place.dtype).as_strided(sizes, place.strides)


class _BoxPlanner(DefaultLoadPlanner):
    """Asks for one box of one tensor, or for one object."""

    def __init__(self, target: torch.Tensor | None = None) -> None:
        super().__init__()
        self.target = target
        self.stored = b""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert self.target is not None
        target = self.target
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.stored = value.getvalue()


class TensorReader:
    """Reads boxes of the tensors of one checkpoint, and its objects."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._reader = WindowReader(checkpoint)
        self._chunks: dict[str, SavedChunks] = {}

    def read(self, entry: Entry, box: Chunk) -> torch.Tensor:
        """A box of a tensor, in its dtype, on the CPU. Beside it, at most as many bytes are used on the way.

        Raises:
            CheckpointError: some of the box is in no file, or a file is missing or damaged.
        """
        if entry.key not in self._chunks:
            found = self._checkpoint.metadata.state_dict_metadata[entry.key]
            assert isinstance(found, TensorStorageMetadata)
            self._chunks[entry.key] = SavedChunks(found)
        target = torch.empty(box.sizes, dtype=entry.dtype)
        items = self._chunks[entry.key].read_items(Box(entry.key, box.offsets, target))
        if sum(math.prod(item.lengths) for item in items) < box.numel:
            raise CheckpointError(f"{entry.key}: some of {box} is in no file of {self._checkpoint.path}")
        if box.numel:
            self._run(entry, items, _BoxPlanner(target))
        return target

    def read_bytes(self, entry: Entry) -> bytes:
        """The bytes of an object; errors as for `read`."""
        index = MetadataIndex(entry.key)
        item = ReadItem(LoadItemType.BYTE_IO, index, torch.Size((0,)), index, torch.Size((0,)), torch.Size((0,)))
        planner = _BoxPlanner()
        self._run(entry, [item], planner)
        return planner.stored

    def _run(self, entry: Entry, items: list[ReadItem], planner: _BoxPlanner) -> None:
        where = f"{entry.key} in {self._checkpoint.path} can't be read"
        if any(item.storage_index not in self._reader.storage_data for item in items):
            raise CheckpointError(f"{where}: some of it is in no file")
        try:
            self._reader.read_data(LoadPlan(items), planner).wait()
        except FileNotFoundError as error:
            raise CheckpointError(f"{where}: there is no file {error.filename}") from error
        # A damaged file may fail in any way there is.
        except Exception as error:
            files = ", ".join(sorted({self._reader.storage_data[item.storage_index].relative_path for item in items}))
            raise CheckpointError(f"{where}; it is in {files}: {error or type(error).__name__}") from error
