"""Figures about elements that can be taken piece by piece: some add up, of others the largest counts.

All are float64, in which counts are exact up to 2**53.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tally:
    """Figures of some elements. Those of more of them are the sums of ``sums`` and the maxima of ``peaks``."""

    sums: torch.Tensor
    peaks: torch.Tensor

    @classmethod
    def of(cls, sums: list[float], peaks: list[float]) -> Tally:
        return cls(torch.tensor(sums, dtype=torch.float64), torch.tensor(peaks, dtype=torch.float64))

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.sums + other.sums, torch.maximum(self.peaks, other.peaks))

    @classmethod
    def stack(cls, tallies: list[Tally]) -> Tally:
        return cls(torch.stack([tally.sums for tally in tallies]), torch.stack([tally.peaks for tally in tallies]))

    def unstack(self) -> list[Tally]:
        return [Tally(sums, peaks) for sums, peaks in zip(self.sums, self.peaks, strict=True)]


@dataclass(frozen=True)
class Summary:
    """Figures of the elements of a tensor. NaN is counted, and left out of the others.

    ``l2`` is the root of the sum of squared magnitudes, taken in float64. ``minimum`` and ``maximum`` are None without
    elements that aren't NaN, and for complex numbers, which have no order.
    """

    elements: int
    l2: float
    minimum: float | None
    maximum: float | None
    nan: int
    infinite: int

    @classmethod
    def of(cls, tally: Tally) -> Summary:
        elements, squares, nan, infinite = tally.sums.tolist()
        maximum, negated_minimum = tally.peaks.tolist()
        ordered = maximum >= -negated_minimum
        return cls(
            int(elements),
            math.sqrt(squares),
            -negated_minimum if ordered else None,
            maximum if ordered else None,
            int(nan),
            int(infinite),
        )


NO_VALUES = Tally.of([0.0] * 4, [-math.inf] * 2)


def tally_values(tensor: torch.Tensor) -> Tally:
    """What `Summary` needs to know of a tensor of any dtype."""
    numbers = as_numbers(tensor).flatten()
    is_nan = numbers.isnan()
    nan = int(is_nan.sum())
    if nan:
        numbers = numbers[~is_nan]
    infinite = int(numbers.isinf().sum())
    peaks = [-math.inf, -math.inf]
    if numbers.numel() and not numbers.is_complex():
        peaks = [float(numbers.max()), -float(numbers.min())]
    squares = float(torch.view_as_real(numbers).square().sum() if numbers.is_complex() else numbers.square().sum())
    return Tally.of([tensor.numel(), squares, nan, infinite], peaks)


@dataclass(frozen=True)
class Difference:
    """Figures of two tensors of one shape.

    ``differing`` elements have |a - b| > atol + rtol * |b|, or NaN on one side only (``nan_on_one_side`` of them). NaN
    on both sides is equal, so are infinities of one sign. ``max_abs`` is the largest |a - b|, ``max_rel`` the largest
    |a - b| / max(|a|, |b|), ``l2`` the norm of a - b in float64; elements with NaN are left out of these three.
    """

    elements: int
    differing: int
    nan_on_one_side: int
    max_abs: float
    max_rel: float
    l2: float

    @classmethod
    def of(cls, tally: Tally) -> Difference:
        elements, differing, nan, squares = tally.sums.tolist()
        max_abs, max_rel = tally.peaks.tolist()
        return cls(int(elements), int(differing), int(nan), max_abs, max_rel, math.sqrt(squares))


NO_DIFFERENCE = Tally.of([0.0] * 4, [0.0] * 2)


def tally_difference(a: torch.Tensor, b: torch.Tensor, atol: float, rtol: float) -> Tally:
    """What `Difference` needs to know of two tensors of one shape; their dtypes may differ."""
    if a.dtype == b.dtype and _bits(a).equal(_bits(b)):
        return Tally.of([a.numel(), 0, 0, 0], [0.0, 0.0])
    numbers_a, numbers_b = as_numbers(a).flatten(), as_numbers(b).flatten()
    # Large integers that differ can be one number in float64.
    exact = a.dtype == b.dtype and a.dtype in (torch.int64, torch.uint64)
    unequal = a.flatten() != b.flatten() if exact else numbers_a != numbers_b
    nan_a, nan_b = numbers_a.isnan(), numbers_b.isnan()
    unequal &= ~(nan_a & nan_b)
    positions = unequal.nonzero().flatten()
    one_sided = int((nan_a ^ nan_b).sum())
    numbers_a, numbers_b = numbers_a[positions], numbers_b[positions]
    distance = (numbers_a - numbers_b).abs()
    beyond = len(positions) if atol == rtol == 0 else int((~_close(distance, numbers_b, atol, rtol)).sum())
    known = ~(numbers_a.isnan() | numbers_b.isnan())
    distance, scale = distance[known], torch.maximum(numbers_a.abs(), numbers_b.abs())[known]
    peaks = [0.0, 0.0]
    if len(distance):
        # Infinite against anything is as far as it can be.
        relative = torch.where(scale.isinf(), 1.0, distance / scale)
        peaks = [float(distance.max()), float(relative.max())]
    return Tally.of([a.numel(), beyond, one_sided, float(distance.square().sum())], peaks)


def _close(distance: torch.Tensor, b: torch.Tensor, atol: float, rtol: float) -> torch.Tensor:
    # An infinite bound is no bound.
    return (distance <= atol + rtol * b.abs()) & distance.isfinite()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float64, or complex128; one of a dtype that torch can't convert is taken as its bytes."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    try:
        return tensor.to(wide)
    except NotImplementedError:
        return _bits(tensor).to(wide)
