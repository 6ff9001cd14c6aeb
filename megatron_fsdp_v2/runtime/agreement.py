"""Whether all ranks are about to do the same: an error that names the unit, where collectives alone would hang."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from ..sharding.mesh import DataParallelMesh
from .unit import Unit

type Mode = Literal["first_step", "always", "never"]
MODES: tuple[Mode, ...] = ("first_step", "always", "never")


class Agreement:
    """Compares, before a collective, what the ranks of the root's mesh are about to do.

    A comparison is a blocking all-gather of one int64 along each axis of the mesh, so ``first_step`` stops after the
    first backward: most disagreements are in how the model was built and show by then.
    """

    def __init__(self, mesh: DataParallelMesh, mode: Mode) -> None:
        axes = [mesh.shard, *([mesh.outer] if mesh.outer else [])]
        self._groups = [axis.group for axis in axes if axis.size > 1]
        self._device = mesh.device
        self._mode = mode
        self.is_on = mode != "never" and bool(self._groups)

    def compare(self, what: str) -> None:
        """Go on if all ranks are about to do ``what``; a collective while the comparison is on.

        Raises:
            RuntimeError: another rank is about to do something else; on every rank, with what each is about to do.
        """
        if not self.is_on:
            return
        mine = torch.tensor([zlib.crc32(what.encode())], dtype=torch.int64, device=self._device)
        for group in self._groups:
            others = mine.repeat(dist.get_world_size(group))
            dist.all_gather(list(others.split(1)), mine, group=group)
            if others.ne(mine).any():
                raise RuntimeError(_report(what, group))

    def compare_structure(self, units: Sequence[Unit]) -> None:
        """Go on if all ranks have the same units with the same parameters in the same order."""
        if not self.is_on:
            return
        for unit in units:
            groups = ", ".join(
                f"{group.precision.main} {_parameters(group.names, group.layout.shapes)}" for group in unit.groups
            )
            self.compare(f"shard unit {unit.name!r} with {groups or 'no parameters'}")
        self.compare(f"shard no more than {len(units)} units")

    def end_step(self) -> None:
        """A step ended: the first one may have been all that was to be compared."""
        if self._mode == "first_step":
            self.is_on = False


def _parameters(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join([f"{name} {shape}" for name, shape in zip(names, shapes, strict=True)])


def _report(mine: str, group: dist.ProcessGroup) -> str:
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, mine, group=group)
    by_text: dict[str | None, list[int]] = {}
    for rank, text in zip(dist.get_process_group_ranks(group), texts, strict=True):
        by_text.setdefault(text, []).append(rank)
    lines = [
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()
    ]
    return "ranks disagree on what to do next, which would hang:\n" + "\n".join(lines)
