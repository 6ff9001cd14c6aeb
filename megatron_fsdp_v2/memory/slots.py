"""Memory that several buffers use in turns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .allocator import BufferSpec, check_change
from .stats import AllocatorStats, ArenaStats, ArenaTally, aligned, mebibytes


@dataclass(frozen=True)
class SlotStats:
    """A slot of a plan: its place, size in bytes, the buffers that share it, and which of them is in use."""

    index: int
    arena: str | None
    device: str
    nbytes: int
    buffers: tuple[str, ...]
    owner: str | None


class Binding:
    """A buffer's place in a slot: one tensor for good, at the slot's start."""

    __slots__ = ("_narrowed", "key", "slot", "spec", "tensor")

    def __init__(self, key: Hashable, spec: BufferSpec, slot: Slot) -> None:
        self.key = key
        self.spec = spec
        self.slot = slot
        self.tensor = slot.memory.narrow(0, 0, spec.nbytes).view(spec.dtype)
        self._narrowed: dict[int, torch.Tensor] = {}

    def resized(self, spec: BufferSpec) -> torch.Tensor:
        """The tensor for another spec that is equal or smaller, always the same object for a size.

        Raises:
            ValueError: it isn't.
        """
        if spec == self.spec:
            return self.tensor
        check_change(self.key, self.spec, spec, may_grow=False)
        tensor = self._narrowed.get(spec.numel)
        if tensor is None:
            with torch.inference_mode(False):
                tensor = self._narrowed[spec.numel] = self.tensor.narrow(0, 0, spec.numel)
        return tensor


class Slot:
    """Memory for the largest of several buffers of one arena, lent to one of them at a time."""

    # An allocation of its own each: the device aligns its start, so every dtype fits.
    __slots__ = ("arena", "device", "index", "members", "memory", "nbytes", "owner")

    def __init__(self, index: int, specs: Mapping[Hashable, BufferSpec]) -> None:
        first = next(iter(specs.values()))
        self.index = index
        self.arena = first.arena
        self.device = first.device
        self.nbytes = max([spec.nbytes for spec in specs.values()])
        self.memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.owner: Binding | None = None
        self.members = [Binding(key, spec, self) for key, spec in specs.items()]

    def drop_memory(self) -> None:
        """Give the memory back. Tensors stay, and read or write nothing until it is taken again."""
        self.memory.untyped_storage().resize_(0)

    def take_memory(self) -> None:
        """Take the memory again, behind the same tensors."""
        self.memory.untyped_storage().resize_(self.nbytes)

    @property
    def held_bytes(self) -> int:
        return self.memory.untyped_storage().nbytes()

    def stats(self) -> SlotStats:
        names = tuple([str(binding.key) for binding in self.members])
        owner = None if self.owner is None else str(self.owner.key)
        return SlotStats(self.index, self.arena, str(self.device), self.nbytes, names, owner)


def pool_stats(slots: Sequence[Slot], traced: ArenaTally, dynamic: AllocatorStats) -> dict[str, Any]:
    """Memory held and in use, in total and by arena, of a plan's slots and of what has memory of its own."""
    peaks = {(arena.arena, arena.device): arena.peak_live_bytes for arena in traced.arenas()}
    arenas = [arena for arena in dynamic.arenas if arena.arena is None or not slots]
    for place in dict.fromkeys([(slot.arena, str(slot.device)) for slot in slots]):
        mine = [slot for slot in slots if (slot.arena, str(slot.device)) == place]
        arenas.append(
            ArenaStats(
                *place,
                pool_bytes=sum([slot.held_bytes for slot in mine]),
                live_bytes=sum([slot.owner.spec.nbytes for slot in mine if slot.owner is not None]),
                peak_live_bytes=peaks.get(place, 0),
                slots=len(mine),
                keys=sum([len(slot.members) for slot in mine]),
            )
        )
    named = [arena for arena in arenas if arena.arena is not None]
    return {
        "pool_bytes": sum([arena.pool_bytes for arena in named]),
        "live_bytes": sum([arena.live_bytes for arena in named]),
        "arenas": tuple(arenas),
    }


def slots_table(slots: Sequence[SlotStats]) -> str:
    """Slots as lines of text, sizes in MiB, with the buffers that share each."""
    rows: list[tuple[str, ...]] = [("slot", "arena", "size", "buffers", "in use")]
    for slot in slots:
        owner = slot.owner or "-"
        rows.append((str(slot.index), slot.arena or "none", mebibytes(slot.nbytes), str(len(slot.buffers)), owner))
    head, *lines = aligned(rows)
    shared = [f"{line}  {_listed(slot.buffers)}" for line, slot in zip(lines, slots, strict=True)]
    return "\n".join([head, *shared])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
