"""What is measured. Free of torch, so that the command answers at once."""

from __future__ import annotations

from dataclasses import dataclass, field

# The name of the modules that nothing wraps.
PLAIN = "plain modules"


@dataclass
class StepFigures:
    """What was measured of one variant. Bytes are those of one rank.

    ``copied_by_operator`` holds bytes written per step beyond what the plain model's forward and backward write;
    ``copied_by_backend`` says how many of them are the communication backend's doing.
    ``seconds`` and ``cpu_seconds`` (of the whole process) have one value per timed step, that of the slower rank.
    ``loss`` is that of the last step, of rank 0.
    """

    name: str
    peer: str | None
    calls: dict[str, int]
    payload: dict[str, int]
    copied_by_operator: dict[str, int]
    copied_by_backend: int
    peak_bytes: int
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    loss: float = 0.0

    @property
    def copied(self) -> int:
        """Bytes written per step beyond the plain model's, the backend's included."""
        return sum(self.copied_by_operator.values())


@dataclass
class StepResult:
    """Figures of all variants, and the bytes of the model's parameters."""

    parameter_bytes: int
    variants: list[StepFigures]

    def of(self, name: str) -> StepFigures:
        """The figures of the variant called ``name``."""
        return next(figures for figures in self.variants if figures.name == name)


@dataclass
class HostFigures:
    """Microseconds per unit of every timed forward and backward of one variant."""

    name: str
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)


@dataclass
class GrowthFigures(HostFigures):
    """Host figures of a model of ``units`` units, sharded over ``ranks`` ranks.

    ``forward_sending`` and ``backward_sending`` are what the simulated group needs for the same collectives alone, once
    per round, in microseconds per unit.
    """

    units: int = 0
    ranks: int = 0
    forward_sending: list[float] = field(default_factory=list)
    backward_sending: list[float] = field(default_factory=list)


@dataclass
class StartFigures:
    """Processor seconds to wrap a model of so many layers, parameter tensors and elements, once per round."""

    name: str
    layers: int
    parameters: int
    elements: int
    seconds: list[float] = field(default_factory=list)


@dataclass
class GrowthResult:
    """How costs grow: of a step on the host, and of wrapping."""

    host: list[GrowthFigures]
    start: list[StartFigures]


@dataclass
class StorageFigures:
    """Seconds of every save and load of one side, those of the slower rank."""

    name: str
    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


@dataclass
class StorageResult:
    """Figures of plain DCP and of v2, and the bytes of the state that each saves, of all ranks together."""

    state_bytes: int
    sides: list[StorageFigures]


@dataclass
class PreparationFigures:
    """Processor seconds to prepare the state dict of a model of so many layers, which has so many keys."""

    layers: int
    keys: int
    seconds: list[float] = field(default_factory=list)
