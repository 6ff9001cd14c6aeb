"""What a sharded module holds and sends, as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True)
class Collective:
    """One call that a step makes, or, among totals, ``calls`` alike.

    Attributes:
        phase: ``forward`` or ``backward``.
        kind: ``all-gather``, ``reduce-scatter`` or ``all-reduce``.
        axis: ``shard``, ``outer``, or ``neighbours``, a part of the shard axis.
        ranks: how many ranks take part.
        bytes: the whole tensor: the output of an all-gather, the input of a reduce-scatter, the tensor of an
            all-reduce; the sum over all ``calls``.
        calls: how many.
    """

    phase: str
    kind: str
    axis: str
    ranks: int
    bytes: int
    calls: int = 1


@dataclass(frozen=True)
class RankBytes:
    """Bytes on one rank, padding included.

    Attributes:
        compute_weights: weights as they are computed with, or gathered from, at rest.
        main_weights: weights the optimizer steps; 0 where they are a part of the compute weights.
        main_gradients: gradients the optimizer finds, from the first reduction of a step until they are cleared.
        gathered_weights: further weights while the unit computes.
        kept_weights: weights kept from forward to backward for a gather among neighbours.
    """

    compute_weights: int = 0
    main_weights: int = 0
    main_gradients: int = 0
    gathered_weights: int = 0
    kept_weights: int = 0

    @property
    def at_rest(self) -> int:
        """Weights and gradients between two steps, before gradients are cleared."""
        return self.compute_weights + self.main_weights + self.main_gradients


@dataclass(frozen=True)
class GroupPlan:
    """Parameters of a unit that lie in the same buffers.

    ``dtypes`` has the keys ``compute``, ``main``, ``gradients`` and ``communication``; ``placements`` has ``compute``,
    ``main`` and, if trainable, ``gradients``, each with a placement by axis. ``padding`` is in elements, and
    ``padding_percent`` of ``elements``, those of the parameters. ``main_device`` is where main weights rest.
    """

    trainable: bool
    parameters: int
    elements: int
    padding: int
    padding_percent: float
    segments: int
    dtypes: dict[str, str]
    placements: dict[str, dict[str, str]]
    main_device: str
    bytes: RankBytes


@dataclass(frozen=True)
class UnitPlan:
    """One call of ``fully_shard``: the paths and classes of its modules, what it holds, and what a step sends for it.

    ``mesh`` has the number of ranks by axis. ``has_backward`` tells whether a gradient passes the unit.
    """

    paths: tuple[str, ...]
    modules: tuple[str, ...]
    device: str
    mesh: dict[str, int]
    reshard_after_forward: bool | int
    has_backward: bool
    groups: tuple[GroupPlan, ...]
    collectives: tuple[Collective, ...]

    @property
    def bytes(self) -> RankBytes:
        """Those of all groups."""
        return _summed([group.bytes for group in self.groups])


@dataclass(frozen=True)
class Totals:
    """Sums over units. Of gathered weights there is the largest unit's, as ``largest_gathered_unit``."""

    units: int
    parameters: int
    elements: int
    padding: int
    compute_weights: int
    main_weights: int
    main_gradients: int
    largest_gathered_unit: int
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Plan:
    """All units of a module in registration order, and their totals; of one rank and one step."""

    module: str
    units: tuple[UnitPlan, ...]
    totals: Totals

    def to_json(self) -> str:
        """The plan as one JSON object, its keys named as here."""
        return json.dumps(asdict(self), indent=2)


def totals_of(units: Sequence[UnitPlan]) -> Totals:
    """What the units hold and send together."""
    groups = [group for unit in units for group in unit.groups]
    held = _summed([group.bytes for group in groups])
    return Totals(
        units=len(units),
        parameters=sum(group.parameters for group in groups),
        elements=sum(group.elements for group in groups),
        padding=sum(group.padding for group in groups),
        compute_weights=held.compute_weights,
        main_weights=held.main_weights,
        main_gradients=held.main_gradients,
        largest_gathered_unit=max([unit.bytes.gathered_weights for unit in units], default=0),
        collectives=joined(collective for unit in units for collective in unit.collectives),
    )


def joined(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Collectives of the same phase, kind and ranks as one entry each, in order of appearance."""
    found: dict[tuple[str, str, str, int], tuple[int, int]] = {}
    for one in collectives:
        key = (one.phase, one.kind, one.axis, one.ranks)
        size, calls = found.get(key, (0, 0))
        found[key] = (size + one.bytes, calls + one.calls)
    return tuple(Collective(*key, size, calls) for key, (size, calls) in found.items())


def _summed(parts: Sequence[RankBytes]) -> RankBytes:
    return RankBytes(**{field.name: sum(getattr(part, field.name) for part in parts) for field in fields(RankBytes)})
