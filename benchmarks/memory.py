"""Peak memory of training steps on two gloo ranks, by what it is for, on models of several shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from megatron_fsdp_v2.explain import describe

from .models import HIDDEN, LanguageModel
from .ranks import Tell, run_on_ranks
from .results import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    MEMORY_KINDS,
    OPTIMIZER,
    SENT,
    TEMPORARIES,
    WEIGHTS,
    MemoryFigures,
    MemoryResult,
)
from .variants import VARIANTS, Variant

RANKS = 2
WARMUP = 3
# Operators that fill their outputs, and those whose inputs are gradients on their way, by argument.
_FILLED_BY = {
    ("c10d", "allgather"): {0: GATHERED},
    ("c10d", "reduce_scatter"): {0: GRADIENTS, 1: SENT},
    ("c10d", "allreduce"): {0: GRADIENTS},
    ("fsdp", "all_gather_copy_in"): {1: GATHERED},
    ("fsdp", "split_with_sizes_copy"): {3: GATHERED},
    ("fsdp", "chunk_cat"): {3: SENT},
}


@dataclass(frozen=True)
class Shape:
    """A language model, its tokens per rank as (batch, sequence), and how many of its blocks are one unit."""

    name: str
    tokens: tuple[int, int]
    model: dict[str, Any] = field(default_factory=dict)
    grouped: int = 1

    def build(self) -> LanguageModel:
        return LanguageModel(**self.model)

    def units(self, model: LanguageModel) -> list[Any]:
        """What becomes a unit each: a block, or a list of some."""
        blocks = list(model.blocks)
        if self.grouped == 1:
            return blocks
        return [blocks[start : start + self.grouped] for start in range(0, len(blocks), self.grouped)]


SHAPES = (
    Shape("many tokens", (4, 64)),
    Shape("few tokens", (1, 16), {"hidden": 512}),
    Shape("recomputed", (8, 128), {"recompute": True}),
    Shape("grouped", (4, 64), {"hidden": HIDDEN // 2, "layers": 16}, grouped=4),
)
SHARDED = tuple(variant for variant in VARIANTS if variant.name not in ("DDP", "v2 no_shard"))


class KindTracker(MemTracker):
    """Torch's tracker, with what every byte is for at the moment of the highest total since ``begin``.

    ``at_peak`` has bytes by kind. At rest there are weights and optimizer states; what collectives fill or read is
    known by the collective; the rest is what forwards left, recomputed ones included, or what is computed with.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_peak: dict[str, int] = {}
        self._highest = -1
        self._at_rest: WeakIdKeyDictionary | None = None
        self._filled: Any = WeakIdKeyDictionary()
        self._is_view = False

    def begin(self) -> None:
        """Start the step whose peak is wanted, with everything at rest."""
        self.reset_mod_stats()
        self._highest = -1
        at_rest: Any = WeakIdKeyDictionary()
        for storage, (info, _) in self._WINFO.items():
            # Buffers that come and go keep a storage of size zero.
            if info.mem_consumed:
                at_rest[storage] = OPTIMIZER if info.reftype.value == "Optstate" else WEIGHTS
        self._at_rest = at_rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(issubclass(kind, DTensor) for kind in types):
            namespace, name = func.name().split(".")[0].split("::")
            for (place, part), filled in _FILLED_BY.items():
                if place == namespace and part in name:
                    values = [*args, *(kwargs or {}).values()]
                    for position, kind in filled.items():
                        for tensor in _tensors(values[position] if position < len(values) else None):
                            self._filled[tensor.untyped_storage()] = kind
            self._is_view = func.is_view
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track(self, reftype: Any, t: torch.Tensor) -> None:
        # What was made below the dispatcher is seen for the first time as somebody's view of it, while gloo makes a
        # reduce-scatter of an all-reduce. Its copy is there whoever asks, at times that the host doesn't decide.
        if not self._is_view or t.untyped_storage() in self._WINFO:
            super()._track(reftype, t)

    def _update_peak_stats(self, peak_state: Any) -> None:
        super()._update_peak_stats(peak_state)
        total = sum(device["Total"] for device in self._curr_mem_snap.values())
        if self._at_rest is not None and total > self._highest:
            self._highest = total
            found: Counter[str] = Counter()
            for storage, (info, _) in self._WINFO.items():
                found[self._kind_of(storage, info.reftype.value)] += info.mem_consumed
            self.at_peak = {kind: found[kind] for kind in MEMORY_KINDS}

    def _kind_of(self, storage: Any, reference: str) -> str:
        assert self._at_rest is not None
        filled = self._filled.get(storage)
        if filled == GRADIENTS:
            return GRADIENTS
        if (resting := self._at_rest.get(storage)) is not None:
            return str(resting)
        if filled is not None:
            return str(filled)
        return {"Gradient": SENT, "Activation": ACTIVATIONS}.get(reference, TEMPORARIES)


def run(tell: Tell, shapes: Sequence[Shape] = SHAPES) -> list[MemoryResult]:
    """Measure all variants on all shapes; rank 0's figures."""
    ranks = run_on_ranks(measure, RANKS, RANKS, "gloo", tell, shapes)
    results: list[MemoryResult] = ranks[0]
    return results


def measure(tell: Tell, shapes: Sequence[Shape], variants: Sequence[Variant] = SHARDED) -> list[MemoryResult]:
    """The part of one rank."""
    results = []
    for shape in shapes:
        size = sum(p.numel() * p.element_size() for p in shape.build().parameters())
        result = MemoryResult(shape.name, size, [])
        for variant in variants:
            tell(f"{shape.name}: {variant.name}")
            result.variants.append(_figures(shape, variant))
        results.append(result)
    return results


def _figures(shape: Shape, variant: Variant) -> MemoryFigures:
    tracker = KindTracker()
    # Entered before the model exists, so that no buffer escapes it.
    with tracker:
        torch.manual_seed(0)
        model = shape.build()
        wrapped = variant.wrap(model, shape.units(model))
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        batch = torch.randint(model.head.out_features, (2, *shape.tokens), generator=generator)
        for _ in range(WARMUP):
            tracker.reset_mod_stats()
            _step(wrapped, optimizer, batch)
        tracker.begin()
        _step(wrapped, optimizer, batch)
    figures = MemoryFigures(variant.name, variant.peer, tracker.at_peak)
    if variant.is_ours:
        _note_units(wrapped, figures)
    return figures


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch[0], batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _note_units(model: nn.Module, figures: MemoryFigures) -> None:
    root, *units = describe(model).units
    figures.root = root.bytes.gathered_weights
    figures.unit = max(unit.bytes.gathered_weights for unit in units)
    figures.gradient = max(sum(one.bytes for one in unit.collectives if one.kind != "all-gather") for unit in units)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from _tensors(item)
