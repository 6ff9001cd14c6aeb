"""ZeRO stages as data: a placement for every buffer and data-parallel axis."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Placement(Enum):
    """How a flat buffer lies along one data-parallel axis."""

    REPLICATED = "replicated"
    PARTIAL = "partial"
    SHARDED = "sharded"


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """Placements along one axis.

    ``deferred`` tells that gradients stay partial along the axis until the step when the caller marks micro-batches.
    """

    compute: Placement
    grads: Placement
    main: Placement
    deferred: bool


_R, _S = Placement.REPLICATED, Placement.SHARDED

SHARD_STRATEGIES = {
    "no_shard": AxisStrategy(compute=_R, grads=_R, main=_R, deferred=True),
    "optim": AxisStrategy(compute=_R, grads=_S, main=_S, deferred=True),
    "optim_grads": AxisStrategy(compute=_R, grads=_S, main=_S, deferred=False),
    "optim_grads_params": AxisStrategy(compute=_S, grads=_S, main=_S, deferred=False),
}
OUTER_STRATEGIES = {
    "no_shard": AxisStrategy(compute=_R, grads=_R, main=_R, deferred=True),
    "optim": AxisStrategy(compute=_R, grads=_S, main=_S, deferred=True),
}


@dataclass(frozen=True, slots=True)
class Strategy:
    """The strategies of the shard axis and, on a 2-D mesh, of the outer axis."""

    shard: AxisStrategy
    outer: AxisStrategy | None

    @property
    def weights_resharded(self) -> bool:
        """Whether computing needs an all-gather for every use of the weights."""
        return self.shard.compute is Placement.SHARDED


def resolve_strategy(strategy: str, outer_strategy: str, has_outer_axis: bool) -> Strategy:
    """Look up strategy names.

    Raises:
        ValueError: a name is unknown, an outer strategy is asked for on a 1-D mesh, or the pair can't be combined.
    """
    if not isinstance(strategy, str) or strategy not in SHARD_STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is unknown; choose one of {', '.join(SHARD_STRATEGIES)}")
    if not isinstance(outer_strategy, str) or outer_strategy not in OUTER_STRATEGIES:
        raise ValueError(f"outer_strategy={outer_strategy!r} is unknown; choose one of {', '.join(OUTER_STRATEGIES)}")
    if not has_outer_axis:
        if outer_strategy != "no_shard":
            raise ValueError(f"outer_strategy={outer_strategy!r} needs a 2-D mesh (outer, shard); the mesh is 1-D")
        return Strategy(SHARD_STRATEGIES[strategy], None)
    if outer_strategy == "optim" and strategy == "no_shard":
        raise ValueError("outer_strategy='optim' shards what strategy='no_shard' keeps whole; use strategy='optim'")
    return Strategy(SHARD_STRATEGIES[strategy], OUTER_STRATEGIES[outer_strategy])
