"""Memory whose contents are in CPU memory for a while.

A storage gives its memory up and stays the object that it is. Views of it, DTensors, parameters and optimizers that
refer to it find everything in place once it is brought back. Until then torch raises on every access to its data.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

import torch

# Attribute of a storage without memory: a weak reference to the ``HostCopies`` that can bring it back.
_MARK = "_fsdp_host_copies"


class Kind(StrEnum):
    """What memory between steps is for. Weights that are both computed with and stepped are compute weights."""

    COMPUTE_WEIGHTS = "compute_weights"
    MAIN_WEIGHTS = "main_weights"
    MAIN_GRADIENTS = "main_gradients"
    OPTIMIZER_STATE = "optimizer_state"


ALL_KINDS = tuple(Kind)


@dataclass(frozen=True, eq=False)
class _HostCopy:
    kind: Kind
    storage: torch.UntypedStorage
    contents: torch.Tensor
    word: str


class HostCopies:
    """What of one unit is in CPU memory."""

    def __init__(self) -> None:
        self._copies: list[_HostCopy] = []

    def take(self, kind: Kind, storage: torch.UntypedStorage, unit: str, pinned: bool) -> None:
        """Copy the contents of a storage of ``unit`` to CPU memory and give its own memory up."""
        contents = host_memory(storage.nbytes(), pinned)
        contents.untyped_storage().copy_(storage, non_blocking=False)
        word = f"{kind.replace('_', ' ')} of unit {unit!r} are in CPU memory; call reload_to_gpu() on the module before"
        copy = _HostCopy(kind, storage, contents, word)
        storage.resize_(0)
        setattr(storage, _MARK, weakref.ref(self))
        _forbid_access(copy)
        self._copies.append(copy)

    def give_back(self, kinds: Collection[Kind] = ALL_KINDS) -> None:
        """Bring everything of ``kinds`` back to where it was."""
        if not self._copies:
            return
        for copy in [copy for copy in self._copies if copy.kind in kinds]:
            _allow_access(copy)
            try:
                copy.storage.resize_(copy.contents.nbytes)
            except RuntimeError:
                # Out of memory: what isn't back yet stays where it is.
                _forbid_access(copy)
                raise
            # Blocking, so that streams of the device which read it need no event.
            copy.storage.copy_(copy.contents.untyped_storage(), non_blocking=False)
            delattr(copy.storage, _MARK)
            self._copies.remove(copy)

    def nbytes(self, kind: Kind) -> int:
        """Bytes of a kind that are in CPU memory."""
        return sum([copy.contents.nbytes for copy in self._copies if copy.kind is kind])


def bring_back(tensor: torch.Tensor) -> None:
    """Bring back what ``tensor`` is a view of, with all of its kind in its unit, if that is in CPU memory."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return
    storage = tensor.untyped_storage()
    mark = getattr(storage, _MARK, None)
    copies: HostCopies | None = mark() if mark else None
    if copies is not None:
        copies.give_back({copy.kind for copy in copies._copies if copy.storage is storage})


def host_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    """CPU memory with undefined contents, a 1-D uint8 tensor; page-locked if that is asked for and can be had."""
    if pinned:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            warnings.warn(
                f"{nbytes} bytes of CPU memory could not be page-locked, so copies to and from it are slower ({error})",
                stacklevel=3,
            )
    return torch.empty(nbytes, dtype=torch.uint8)


def _forbid_access(copy: _HostCopy) -> None:
    torch._C._set_storage_data_ptr_access_error_msg(copy.storage._cdata, copy.word)


def _allow_access(copy: _HostCopy) -> None:
    torch._C._clear_storage_data_ptr_access_error_msg(copy.storage._cdata)
