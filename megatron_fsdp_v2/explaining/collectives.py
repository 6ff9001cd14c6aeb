"""Which collectives a unit asks for in one step, read off its placements and settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ..runtime.unit import Unit
from ..sharding.buffer import Placements, changed_axis, piece_sizes
from ..sharding.parameter_group import ParameterGroup
from ..strategy import Placement
from .plan import Collective

_GATHER = "all-gather"


def unit_collectives(unit: Unit, reshard_after_forward: bool | int, has_backward: bool) -> list[Collective]:
    """What a step of one micro-batch sends for the unit after an optimizer step wrote its trainable weights.

    Gathers of a unit come first, then the reductions of its groups.
    """
    frees = bool(reshard_after_forward) or not (has_backward or unit.keeps_weights)
    gathers_again = frees and has_backward and unit.unshard_in_backward
    # Whether a step ends with the weights freed: by backward, or by forward where backward doesn't gather them.
    ends_freed = unit.reshard_after_backward if gathers_again or not frees else True
    per_use = [group for group in unit.groups if group.gathers_per_use]
    stale = [group for group in unit.groups if group.trainable or (group.gathers_per_use and ends_freed)]
    found = list(_gathers(unit, stale, "forward"))
    if gathers_again:
        ranks = 0 if isinstance(reshard_after_forward, bool) else reshard_after_forward
        found += _gathers_among_neighbours(per_use, ranks) if ranks else _gathers(unit, per_use, "backward")
    for group in unit.groups:
        found += _reductions(group)
    return found


def elements(group: ParameterGroup, placements: Placements) -> int:
    """Elements of this rank's buffer of the group under ``placements``, padding included."""
    return sum(piece_sizes(group.layout, group.mesh, placements))


def _gathers(unit: Unit, groups: Sequence[ParameterGroup], phase: str) -> Iterator[Collective]:
    """The gathers that bring groups to the form that is computed with; the last ones of all groups are one call."""
    last: dict[int, int] = {}
    for group in groups:
        path = group.refresh_path
        # What was gathered along the outer axis stays for the rest of the step, unless it's copied for every use.
        if phase == "backward" and group.rest is None:
            path = path[-1:]
        if not group.trainable and group.rest is None:
            path = path[-1:]
        if group.gathers_per_use:
            path = [*path, group.gathered_placements]
        steps = [
            (changed_axis(a, b)[0], elements(group, b) * group.precision.compute.itemsize) for a, b in pairwise(path)
        ]
        for axis, size in steps[:-1]:
            yield from _call(unit, phase, _GATHER, axis, size)
        for axis, size in steps[-1:]:
            last[axis] = last.get(axis, 0) + size
    for axis, size in last.items():
        yield from _call(unit, phase, _GATHER, axis, size)


def _gathers_among_neighbours(groups: Sequence[ParameterGroup], ranks: int) -> Iterator[Collective]:
    size = sum(elements(group, group.gathered_placements) * group.precision.compute.itemsize for group in groups)
    if size:
        yield Collective("backward", _GATHER, "neighbours", ranks, size)


def _reductions(group: ParameterGroup) -> Iterator[Collective]:
    if group.gradients is None:
        return
    for before, after in pairwise(group.gradients.levels):
        axis, _, new = changed_axis(before, after)
        kind = "reduce-scatter" if new is Placement.SHARDED else "all-reduce"
        yield from _call(group, "backward", kind, axis, elements(group, before) * group.precision.comm.itemsize)


def _call(of: Unit | ParameterGroup, phase: str, kind: str, axis: int, size: int) -> Iterator[Collective]:
    """One call, or none where there's nothing to send."""
    mesh_axis = of.mesh.outer if axis else of.mesh.shard
    assert mesh_axis is not None
    if size:
        yield Collective(phase, kind, "outer" if axis else "shard", mesh_axis.size, size)
