"""The `.metadata` of a DCP checkpoint, read without trusting it.

The file is a pickle, and a pickle may call anything. Here it may only build what DCP puts there, and what it builds has
to make sense before anyone uses it.
"""

from __future__ import annotations

import functools
import os
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .errors import CheckpointError

FILE_NAME = ".metadata"
_LATEST = "latest_checkpointed_iteration.txt"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"


def _allowed_globals() -> dict[tuple[str, str], Any]:
    allowed = {("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in metadata.__all__}
    allowed["torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"] = metadata._MEM_FORMAT_ENCODING
    allowed["torch.distributed.checkpoint.filesystem", "_StorageInfo"] = filesystem._StorageInfo
    allowed["torch.distributed.checkpoint.filesystem", "_StoragePrefix"] = filesystem._StoragePrefix
    # Megatron adds every rank's save plan; its older releases had their own names for two classes.
    for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"):
        if hasattr(planner, name):
            allowed["torch.distributed.checkpoint.planner", name] = getattr(planner, name)
    allowed[_MEGATRON, "MCoreMetadata"] = Metadata
    allowed[_MEGATRON, "MCoreSavePlan"] = planner.SavePlan
    allowed["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    allowed["torch", "Size"] = torch.Size
    allowed |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    # A folder's name on whatever system wrote it; Python 3.13 has another name for the module.
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
        allowed |= {(module, name): PurePosixPath for module in ("pathlib", "pathlib._local")}
    return allowed


_ALLOWED = _allowed_globals()


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise CheckpointError(f"it names {module}.{name}, which no checkpoint needs") from None


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """The metadata of the checkpoint in the folder ``path``, or in the metadata file ``path``.

    Nothing in the file can run code: it may build DCP's own classes and plain values, and every name, box and file it
    speaks of is checked. Needs no process group.

    Raises:
        CheckpointError: there is no such file, it is cut off or isn't DCP's, it names anything that isn't needed for
            metadata, or its content contradicts itself.
    """
    file = Path(path)
    file = file / FILE_NAME if file.is_dir() else file
    try:
        with file.open("rb") as stream:
            loaded = _MetadataUnpickler(stream).load()
    except FileNotFoundError:
        raise CheckpointError(_missing(file)) from None
    except CheckpointError as error:
        raise CheckpointError(f"{file} is not trusted: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from error
    # A damaged pickle may fail in any way there is.
    except Exception as error:
        what = "is empty" if file.stat().st_size == 0 else f"is damaged or not DCP's ({type(error).__name__}: {error})"
        raise CheckpointError(f"{file} {what}. Was the save interrupted?") from error
    if problem := _problem(loaded):
        raise CheckpointError(f"{file} is damaged or not DCP's: {problem}")
    assert isinstance(loaded, Metadata)
    return loaded


class SafeFileSystemReader(FileSystemReader):
    """DCP's reader of folders, with metadata read by `read_metadata`.

    `dcp.load(state, storage_reader=SafeFileSystemReader(path), planner=SafeLoadPlanner())` runs no code from the
    checkpoint; the planner is in `stored_objects`.

    Args:
        path: the folder.
        known: its metadata, if `read_metadata` has read it already; the file isn't read again.
    """

    def __init__(self, path: str | os.PathLike[str], known: Metadata | None = None) -> None:
        super().__init__(path)
        self._known = known

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As `read_metadata`; ``rank`` asks for the metadata of one rank, where each wrote its own."""
        rank = kwargs.get("rank")
        known = self._known if rank is None else None
        loaded = known or read_metadata(Path(self._get_metadata_path(rank)))
        if getattr(loaded, "storage_meta", None) is None:
            loaded.storage_meta = StorageMeta()
        assert loaded.storage_meta is not None
        loaded.storage_meta.load_id = self.load_id
        return loaded


def _missing(file: Path) -> str:
    folder = file.parent
    if not file.name.endswith(FILE_NAME):
        return f"{file} is not a folder"
    if not folder.is_dir():
        return f"{folder} is not a folder"
    latest = folder / _LATEST
    step = latest.read_text(errors="replace").strip() if latest.is_file() else ""
    if step.isdigit() or step == "release":
        name = step if step == "release" else f"iter_{int(step):07d}"
        return f"{folder} holds several checkpoints; the latest is {folder / name}"
    if (folder / "__0.metadata").is_file():
        return f"{folder} has metadata for each rank and none for all; it was saved without coordination between ranks"
    return f"{folder} is no DCP checkpoint: it has no {file.name}. Was the save interrupted?"


def _problem(loaded: Any) -> str | None:
    """What contradicts itself in metadata; hostile files included, so nothing about types is taken for granted."""
    if not isinstance(loaded, Metadata):
        return f"it holds a {type(loaded).__name__}, not metadata"
    entries, stored = getattr(loaded, "state_dict_metadata", None), getattr(loaded, "storage_data", None)
    if not isinstance(entries, dict) or not isinstance(stored, dict):
        return "it lists no entries or no storage"
    for key, entry in entries.items():
        if problem := _problem_of_entry(key, entry):
            return f"{key!r}: {problem}"
    for index, info in stored.items():
        if problem := _problem_of_storage(index, info):
            return f"storage of {getattr(index, 'fqn', index)!r}: {problem}"
    return None


def _problem_of_entry(key: Any, entry: Any) -> str | None:
    if not isinstance(key, str):
        return "a key that is no text"
    if isinstance(entry, BytesStorageMetadata):
        return None
    if not isinstance(entry, TensorStorageMetadata):
        return f"neither tensor nor bytes but {type(entry).__name__}"
    properties, chunks = getattr(entry, "properties", None), getattr(entry, "chunks", None)
    if not isinstance(properties, TensorProperties) or not isinstance(getattr(properties, "dtype", None), torch.dtype):
        return "no dtype"
    shape = _indices(getattr(entry, "size", None))
    if shape is None or not isinstance(chunks, list):
        return "no shape or no chunks"
    for chunk in chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            return "a chunk that is none"
        offsets, sizes = _indices(getattr(chunk, "offsets", None)), _indices(getattr(chunk, "sizes", None))
        if offsets is None or sizes is None or not len(offsets) == len(sizes) == len(shape):
            return "a chunk with another number of dimensions"
        if any(offset + size > full for offset, size, full in zip(offsets, sizes, shape, strict=True)):
            return f"a chunk at {offsets} of {sizes} reaches beyond the shape {shape}"
    return None


def _problem_of_storage(index: Any, info: Any) -> str | None:
    if not isinstance(index, MetadataIndex) or not isinstance(getattr(index, "fqn", None), str):
        return "it belongs to no key"
    if index.offset is not None and _indices(index.offset) is None:
        return "an offset that is none"
    if not isinstance(info, filesystem._StorageInfo):
        return f"kept as {type(info).__name__}, which only another kind of storage can read"
    name = getattr(info, "relative_path", None)
    if not isinstance(name, str) or not _is_inside(name):
        return f"the file {name!r} is not inside the folder"
    if _indices((getattr(info, "offset", None), getattr(info, "length", None))) is None:
        return "no place in its file"
    return None


# A file holds thousands of tensors.
@functools.lru_cache(maxsize=4096)
def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts


def _indices(value: Any) -> tuple[int, ...] | None:
    """A sequence of indices or sizes, or None if it isn't one."""
    if not isinstance(value, (tuple, list)) or not all([type(item) is int and item >= 0 for item in value]):
        return None
    return tuple(value)
