"""The settings of the run that saved a checkpoint, read without running any of it.

Megatron saves its parsed command line, a pickled namespace. A pickle may call anything; this one may build the
namespace and plain values. In place of all else, such as the enums among the settings, stands an empty object.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from argparse import Namespace
from typing import Any

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.inspection.contents import Checkpoint
from megatron_fsdp_v2.checkpoint.inspection.reading import TensorReader

KEY = "args"


def read_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """The settings by name, those that are None, numbers, text, or lists and tuples.

    Raises:
        CheckpointError: the checkpoint has none, or they are damaged or no namespace.
    """
    entry = checkpoint.entries.get(KEY)
    if entry is None or entry.kind != "object":
        raise CheckpointError(f"{checkpoint.path} has no settings of a run ({KEY}), so its model isn't known")
    settings = _unpickled(TensorReader(checkpoint).read_bytes(entry), f"{KEY} of {checkpoint.path}")
    return {name: value for name, value in vars(settings).items() if _is_plain(value)}


class _Ignored:
    """Stands for whatever isn't read; takes anything and does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Ignored:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _ignore(self, *args: Any) -> None:
        pass

    __setstate__ = append = extend = add = __setitem__ = _ignore


class _SettingsUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return Namespace if (module, name) == ("argparse", "Namespace") else _Ignored

    def persistent_load(self, pid: Any) -> Any:
        return _Ignored()


def _unpickled(stored: bytes, what: str) -> Namespace:
    try:
        with zipfile.ZipFile(io.BytesIO(stored)) as archive:
            (name,) = [name for name in archive.namelist() if name.split("/")[1:] == ["data.pkl"]]
            loaded = _SettingsUnpickler(io.BytesIO(archive.read(name))).load()
    # Damaged bytes may fail in any way there is.
    except Exception as error:
        raise CheckpointError(f"{what} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(loaded, Namespace):
        raise CheckpointError(f"{what} is no namespace of settings")
    return loaded


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, list, tuple))
