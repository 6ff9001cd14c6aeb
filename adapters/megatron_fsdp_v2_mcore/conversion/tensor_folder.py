"""A folder of safetensors files, read tensor by tensor and without trusting it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_fsdp_v2.checkpoint.errors import CheckpointError

from .hugging_face_config import read_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is, and what it is; dtype is the file's name for it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class TensorFolder:
    """The tensors of a model that is in one file or in several with an index.

    Raises:
        CheckpointError: index or files are missing or damaged, the index names anything but files of this folder, or
            it and the files disagree.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = _all_tensors(path)

    def dtype_of(self, name: str) -> torch.dtype:
        """Raises CheckpointError for others than float32, float16 and bfloat16."""
        stored = self.tensors[name]
        if stored.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} in {stored.file} is {stored.dtype}; weights that are {', '.join(_DTYPES)} can be converted"
            )
        return _DTYPES[stored.dtype]

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU. Raises CheckpointError if the file changed or can't be read."""
        with _opened(self.tensors[name].file) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _all_tensors(path: Path) -> dict[str, StoredTensor]:
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder")
    if not (path / INDEX_NAME).is_file():
        if not (path / SINGLE_NAME).is_file():
            raise CheckpointError(f"{path} has neither {INDEX_NAME} nor {SINGLE_NAME}")
        return _tensors_of(path / SINGLE_NAME)
    places = read_json(path / INDEX_NAME).get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{path / INDEX_NAME} has no weight_map")
    files = {name: _tensors_of(path / _checked(name, path)) for name in sorted(set(map(str, places.values())))}
    found: dict[str, StoredTensor] = {}
    for name, file in places.items():
        if name not in files[str(file)]:
            raise CheckpointError(f"{path / INDEX_NAME} says that {name} is in {file}; it isn't")
        found[name] = files[str(file)][name]
    _refuse_unlisted(path, places, files)
    return found


def _refuse_unlisted(path: Path, places: Mapping[str, Any], files: Mapping[str, Mapping[str, StoredTensor]]) -> None:
    unlisted = [f"{name} in {file}" for file, tensors in files.items() for name in tensors if places.get(name) != file]
    if unlisted:
        raise CheckpointError(
            f"{path / INDEX_NAME} doesn't speak of {', '.join(unlisted[:5])}; is it of another model?"
        )


def _checked(name: str, folder: Path) -> str:
    # A link is followed: Hugging Face's own cache is made of them.
    if Path(name).name != name or "\\" in name or name in ("", ".."):
        raise CheckpointError(f"{folder / INDEX_NAME} names {name!r}, which is no file in its folder")
    return name


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: StoredTensor(path, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged, cut off or no safetensors file: {error}") from error
