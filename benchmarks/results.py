"""What is measured. Free of torch, so that the command answers at once."""

from __future__ import annotations

from dataclasses import dataclass, field

# The name of the modules that nothing wraps.
PLAIN = "plain modules"
# What memory is for. Gathered weights and gradients on their way come and go within a step.
WEIGHTS, OPTIMIZER, ACTIVATIONS = "weights", "optimizer", "activations"
GRADIENTS, GATHERED, SENT, TEMPORARIES = "gradients", "gathered", "on the way", "temporaries"
MEMORY_KINDS = (WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS, GATHERED, SENT, TEMPORARIES)
STATE_KINDS = (WEIGHTS, OPTIMIZER, ACTIVATIONS)


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


@dataclass
class MemoryFigures:
    """Bytes of one rank at the peak of a step, by what they are for.

    Of our variants also what the units are: the root's gathered weights, those of the largest other unit, and its
    gradients when they are sent.
    """

    name: str
    peer: str | None
    kinds: dict[str, int]
    root: int = 0
    unit: int = 0
    gradient: int = 0

    @property
    def peak(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.kinds.values())

    @property
    def above_state(self) -> int:
        """What is above weights and optimizer states at rest and activations."""
        return self.peak - sum(self.kinds[kind] for kind in STATE_KINDS)

    def needed(self, in_flight: bool) -> int:
        """What is at rest at that moment, activations, the root and two units gathered, and a unit's gradient.

        With ``in_flight`` also the gradient that is reduced meanwhile, and what the backward computes with.
        """
        needed = sum(self.kinds[kind] for kind in (*STATE_KINDS, GRADIENTS)) + self.root + 2 * self.unit + self.gradient
        return needed + (self.gradient + self.kinds[TEMPORARIES] if in_flight else 0)


@dataclass
class MemoryResult:
    """Figures of all variants on one shape of model."""

    shape: str
    parameter_bytes: int
    variants: list[MemoryFigures]

    def of(self, name: str) -> MemoryFigures:
        """The figures of the variant called ``name``."""
        return next(figures for figures in self.variants if figures.name == name)
