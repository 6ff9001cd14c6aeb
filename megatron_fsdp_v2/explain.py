"""Says what a sharded module holds and what a step will send, without sending anything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

import torch
import torch.nn as nn

from .explaining.collectives import elements, unit_collectives
from .explaining.plan import GroupPlan, Plan, RankBytes, UnitPlan, totals_of
from .explaining.text import write
from .module import FSDPModule, unsharded_class
from .runtime.unit import Unit
from .sharding.buffer import Placements
from .sharding.parameter_group import ParameterGroup


def explain(module: nn.Module, *, as_json: bool = False, file: TextIO | None = None) -> None:
    """Print the units of ``module``, what each holds on a rank, and the collectives a step makes for it.

    Units that differ by a number in their path alone share a row. No collective: call it on one rank or on all.

    Args:
        module: a sharded module, or one that contains some; before its first forward or after.
        as_json: print a JSON object of what ``describe`` returns instead of tables, every unit for itself.
        file: where to print; standard output if None. Tables have colours if rich is installed and it is a terminal.

    Raises:
        ValueError: nothing in the module is sharded.
    """
    plan, target = describe(module), file or sys.stdout
    if as_json:
        target.write(plan.to_json() + "\n")
    else:
        write(plan, target)


def describe(module: nn.Module) -> Plan:
    """What ``explain`` prints, as data.

    The step it tells of has one micro-batch, in which every unit runs once, reduces all its gradients, and finds its
    trainable weights written since; the first step gathers what is frozen, and compares ranks, on top. A module that
    was not run yet is taken for the root. Which frozen units gradients pass through, the last backward told; before
    one, data is taken to flow through modules as they are registered, and a module's own parameters to be used first.

    Raises:
        ValueError: nothing in the module is sharded.
    """
    paths: dict[Unit, list[str]] = {}
    for path, child in module.named_modules():
        if isinstance(child, FSDPModule):
            paths.setdefault(child._fsdp_unit, []).append(path)
    if not paths:
        raise ValueError(f"module {type(module).__name__} contains nothing sharded; call fully_shard first")
    below = {id(inner) for unit in paths for outer in unit.modules for inner in list(outer.modules())[1:]}
    supposed = _behind_something_trainable(module, list(paths))
    units = []
    for unit, where in paths.items():
        is_inner = any(id(member) in below for member in unit.modules)
        units.append(_unit_plan(unit, where, is_inner, _has_backward(unit, supposed)))
    return Plan(_class_name(module), tuple(units), totals_of(units))


def _has_backward(unit: Unit, supposed: set[Unit]) -> bool:
    """Whether a backward passes the unit: as the last one showed, or else as it's supposed."""
    if unit.context is not None and unit.context.backward_order.is_known:
        return unit in unit.context.backward_order.previous
    return unit in supposed


def _behind_something_trainable(module: nn.Module, units: Sequence[Unit]) -> set[Unit]:
    """Units with something trainable in them, or registered before them."""
    positions = {child: position for position, child in enumerate(module.modules())}
    trained = [
        position
        for child, position in positions.items()
        if any(param is not None and param.requires_grad for param in child._parameters.values())
    ]
    first = min(trained, default=len(positions))
    return {
        unit
        for unit in units
        if any(positions.get(child, -1) >= first for member in unit.modules for child in member.modules())
    }


def _unit_plan(unit: Unit, paths: Sequence[str], is_inner: bool, has_backward: bool) -> UnitPlan:
    reshard = unit.reshard_after_forward
    if reshard is None:
        reshard = is_inner
    mesh = {"shard": unit.mesh.shard.size, **({"outer": unit.mesh.outer.size} if unit.mesh.outer else {})}
    kept_among = 0 if isinstance(reshard, bool) or not has_backward else reshard
    return UnitPlan(
        paths=tuple(paths),
        modules=tuple(_class_name(member) for member in unit.modules),
        device=str(unit.device),
        mesh=mesh,
        reshard_after_forward=reshard,
        has_backward=has_backward,
        groups=tuple(_group_plan(group, kept_among) for group in unit.groups),
        collectives=tuple(unit_collectives(unit, reshard, has_backward)),
    )


def _group_plan(group: ParameterGroup, kept_among: int) -> GroupPlan:
    layout, precision, path = group.layout, group.precision, group.refresh_path
    dtypes = {
        "compute": precision.compute,
        "main": precision.main,
        "gradients": precision.grads,
        "communication": precision.comm,
    }
    placements = {"compute": path[-1], "main": path[0]}
    if group.gradients is not None:
        placements["gradients"] = group.gradients.levels[-1]
    return GroupPlan(
        trainable=group.trainable,
        parameters=len(group.names),
        elements=layout.param_numel,
        padding=layout.padding,
        padding_percent=round(100 * layout.padding / max(layout.param_numel, 1), 4),
        segments=len(layout.chunks),
        dtypes={use: _dtype_name(dtype) for use, dtype in dtypes.items()},
        placements={use: _by_axis(placed) for use, placed in placements.items()},
        main_device=str(group.rest.device if group.rest else group.mesh.device),
        bytes=_rank_bytes(group, kept_among),
    )


def _rank_bytes(group: ParameterGroup, kept_among: int) -> RankBytes:
    precision, path = group.precision, group.refresh_path
    compute = elements(group, path[-1]) * precision.compute.itemsize
    gathered = elements(group, group.gathered_placements) * precision.compute.itemsize if group.gathers_per_use else 0
    copied_per_use = compute if group.rest is not None and group.gathers_per_use else 0
    has_own_main = group.rest is not None or precision.main is not precision.compute
    gradients = 0
    if group.gradients is not None:
        # Where the optimizer's dtype isn't the accumulation's, a second buffer shows the gradients.
        widths = {precision.grads: precision.grads.itemsize, precision.main: precision.main.itemsize}
        gradients = elements(group, group.gradients.levels[-1]) * sum(widths.values())
    return RankBytes(
        compute_weights=compute - copied_per_use,
        main_weights=elements(group, path[0]) * precision.main.itemsize if has_own_main else 0,
        main_gradients=gradients,
        gathered_weights=gathered + copied_per_use,
        kept_weights=gathered // kept_among if kept_among else 0,
    )


def _by_axis(placements: Placements) -> dict[str, str]:
    outer = {"outer": placements.outer.value} if placements.outer is not None else {}
    return {"shard": placements.shard.value, **outer}


def _class_name(module: nn.Module) -> str:
    return unsharded_class(type(module)).__name__


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
