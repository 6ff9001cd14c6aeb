"""Figures of tensors, whole and in pieces, beside those of torch; and how a tensor is cut into boxes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_v2.checkpoint.inspection.memory import boxes, checked_memory, elements_at_a_time
from megatron_fsdp_v2.checkpoint.inspection.tally import (
    NO_DIFFERENCE,
    NO_VALUES,
    Difference,
    Summary,
    tally_difference,
    tally_values,
)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
SEEDS = st.integers(0, 2**32)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, scale: float = 3.0) -> torch.Tensor:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale
    return (
        torch.complex(values, values.flip(0) if shape else values).to(dtype) if dtype.is_complex else values.to(dtype)
    )


def cut(tensor: torch.Tensor, box: tuple[tuple[int, ...], tuple[int, ...]]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(*box, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


@given(SHAPES, st.integers(1, 40))
def test_boxes_tile(shape: tuple[int, ...], most: int) -> None:
    covered = torch.zeros(shape, dtype=torch.int64)
    for box in boxes(shape, most):
        assert 0 < box.numel <= most
        cut(covered, box).add_(1)
    assert bool((covered == 1).all())


def test_boxes_are_rows_where_they_fit() -> None:
    assert [tuple(box) for box in boxes((5, 3), 7)] == [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (1, 3))]
    halves = [((0, 0), (1, 2)), ((0, 2), (1, 1)), ((1, 0), (1, 2)), ((1, 2), (1, 1))]
    assert [tuple(box) for box in boxes((2, 3), 2)] == halves


@given(SHAPES, st.integers(1, 40), SEEDS, st.sampled_from(FLOATS + INTEGERS + COMPLEX))
def test_summary_of_parts_is_that_of_the_whole(
    shape: tuple[int, ...], most: int, seed: int, dtype: torch.dtype
) -> None:
    tensor = random_tensor(shape, dtype, seed)
    parts = sum((tally_values(cut(tensor, box)) for box in boxes(shape, most)), NO_VALUES)
    summary = Summary.of(parts)
    wide = tensor.to(torch.complex128 if dtype.is_complex else torch.float64).flatten()
    assert summary.l2 == pytest.approx(float(torch.linalg.vector_norm(wide)), rel=1e-12)
    assert summary.elements == tensor.numel()
    if tensor.numel() == 0 or dtype.is_complex:
        assert (summary.minimum, summary.maximum) == (None, None)
    else:
        assert (summary.minimum, summary.maximum) == (float(wide.min()), float(wide.max()))


@given(SHAPES, st.integers(1, 40), SEEDS, st.sampled_from(FLOATS + COMPLEX))
def test_difference_of_parts_is_that_of_the_whole(
    shape: tuple[int, ...], most: int, seed: int, dtype: torch.dtype
) -> None:
    a, b = random_tensor(shape, dtype, seed), random_tensor(shape, dtype, seed + 1)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    b = torch.where(torch.rand(shape) < 0.5, a.to(wide), b.to(wide)).to(dtype)
    atol, rtol = 0.25, 0.125
    tallies = (tally_difference(cut(a, box), cut(b, box), atol, rtol) for box in boxes(shape, most))
    found = Difference.of(sum(tallies, NO_DIFFERENCE))
    wide_a, wide_b = a.to(wide).flatten(), b.to(wide).flatten()
    distance = (wide_a - wide_b).abs()
    assert found.elements == a.numel()
    assert found.differing == int((~torch.isclose(wide_a, wide_b, atol=atol, rtol=rtol)).sum())
    assert found.l2 == pytest.approx(float(distance.norm()), rel=1e-12)
    assert found.max_abs == (float(distance.max()) if a.numel() else 0.0)
    scale = torch.maximum(wide_a.abs(), wide_b.abs()).clamp_min(1e-300)
    assert found.max_rel == pytest.approx(float((distance / scale).max()) if a.numel() else 0.0)


def test_nan_and_infinities_are_counted() -> None:
    values = torch.tensor([math.nan, 3.0, -math.inf, -4.0, math.nan])
    assert Summary.of(tally_values(values)) == Summary(5, math.inf, -math.inf, 3.0, 2, 1)
    assert Summary.of(tally_values(values[:2])) == Summary(2, 3.0, 3.0, 3.0, 1, 0)
    assert Summary.of(tally_values(values[:1])) == Summary(1, 0.0, None, None, 1, 0)


@pytest.mark.parametrize("tolerance", [0.0, 10.0])
def test_nan_and_infinities_are_compared(tolerance: float) -> None:
    inf, nan = math.inf, math.nan
    a = torch.tensor([nan, nan, 1.0, inf, inf, inf, 5.0])
    b = torch.tensor([nan, 1.0, nan, inf, -inf, 2.0, -inf])
    found = Difference.of(tally_difference(a, b, tolerance, tolerance))
    assert found == Difference(7, differing=5, nan_on_one_side=2, max_abs=inf, max_rel=1.0, l2=inf)
    assert not torch.isclose(a, b, tolerance, tolerance, equal_nan=True)[[1, 2, 4, 5, 6]].any()


def test_large_integers_that_are_one_number_in_float64() -> None:
    a, b = torch.tensor([2**60, 1]), torch.tensor([2**60 + 1, 1])
    assert Difference.of(tally_difference(a, b, 0.0, 0.0)).differing == 1
    assert Difference.of(tally_difference(a.to(torch.uint64), b.to(torch.uint64), 0.0, 0.0)).differing == 1
    assert Difference.of(tally_difference(a, a.clone(), 0.0, 0.0)).differing == 0


def test_dtypes_may_differ() -> None:
    a = torch.tensor([1.0, 1.0009765625, 2.0])
    found = Difference.of(tally_difference(a, a.bfloat16(), 0.0, 0.0))
    assert (found.differing, found.max_abs) == (1, 0.0009765625)
    assert Difference.of(tally_difference(a, a.bfloat16(), 0.0, 2**-8)).differing == 0


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.uint16])
def test_dtypes_torch_knows_little_of(dtype: torch.dtype) -> None:
    a = torch.arange(16, dtype=torch.uint8).reshape(2, 8).view(dtype)
    b = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    b[1, 3] += 1
    assert Summary.of(tally_values(a)).elements == a.numel()
    assert Difference.of(tally_difference(a, a.clone(), 0.0, 0.0)).differing == 0
    assert Difference.of(tally_difference(a, b.view(dtype), 0.0, 0.0)).differing == 1


def test_memory_limits_what_is_read_at_once() -> None:
    assert checked_memory(1 << 20) == 1 << 20
    assert 64 << 10 <= checked_memory(None) <= 4 << 30
    with pytest.raises(ValueError, match="memory=1000: at least"):
        checked_memory(1000)
    assert elements_at_a_time(1 << 20, torch.float32) * (8 + 32) <= 1 << 20
    assert elements_at_a_time(1 << 20, torch.complex64, torch.complex64) < elements_at_a_time(1 << 20, torch.int8)
