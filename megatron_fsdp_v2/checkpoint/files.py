"""DCP's writer and planners for flat state dicts: errors name files, and nothing is stored that can't be loaded."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import FLATTEN_MAPPING
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItem
from torch.utils.dlpack import from_dlpack

from .errors import CheckpointError
from .stored_objects import read_object


class NamingWriter(FileSystemWriter):
    """DCP's writer of folders, except that what goes wrong with a file says with which."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs = _NamingFileSystem()


class FlatSavePlanner(DefaultSavePlanner):
    """DCP's usual planner for a state dict that is flat already; ``paths`` are what it nests by, for other readers."""

    def __init__(self, paths: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__()
        self._paths: FLATTEN_MAPPING = dict(paths)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Called by DCP."""
        self.state_dict = state_dict
        self.mappings = self._paths
        self.is_coordinator = is_coordinator

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Called by DCP."""
        data = super().resolve_data(write_item)
        return _by_itself(data.detach()) if isinstance(data, torch.Tensor) else data


def check_objects(flat: Mapping[str, Any]) -> None:
    """Stores and reads every object of a state dict, to see that a load will accept it.

    Raises:
        CheckpointError: one needs classes that a load wouldn't trust, or can't be pickled.
    """
    for key, value in flat.items():
        if isinstance(value, torch.Tensor):
            continue
        file = io.BytesIO()
        try:
            torch.save(value, file)
        # A class may fail to be pickled in any way there is.
        except Exception as error:
            raise CheckpointError(f"{key} can't be saved: {type(error).__name__}: {error}") from error
        try:
            read_object(file.getvalue(), key)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Save plain values, or allow its classes with torch.serialization.add_safe_globals"
            ) from error


def _by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage that ends where the tensor does: of others DCP's writer makes a copy.

    Shards are parts of flat buffers, so a save would copy all weights.
    """
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        return tensor
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    # As bytes, since DLPack doesn't know every dtype.
    alone: torch.Tensor = from_dlpack(tensor.view(-1).view(torch.uint8))
    return alone.view(tensor.dtype).view(tensor.shape)


class _NamingFileSystem(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except OSError as error:
            if error.filename is None:
                error.filename = os.fspath(path)
            raise
        # Tensors are written by C++, which reports a full disk in its own way.
        except RuntimeError as error:
            raise CheckpointError(f"{os.fspath(path)} can't be written: {error}") from error
