"""The layout of a group: rows whole, every element exactly once, the same plan everywhere."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_fsdp_v2.sharding.layout import ALIGNMENT, GroupLayout, RowRange, plan_layout

Shape = tuple[int, ...]

# Sizes that share divisors, that don't, and that are empty; few enough for several parameters to agree by chance.
_SIZE = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 31, 64])
_SMALL = st.lists(_SIZE, max_size=3).map(tuple)
# Many short rows, so that row sizes that don't divide each other share a segment.
_TALL = st.tuples(st.sampled_from([999, 4096, 5000]), st.sampled_from([6, 8, 9, 12, 18]))
SHAPES = st.lists(st.one_of(_SMALL, _TALL), max_size=8)
WORLD = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 64])


def rows_of(shape: Shape) -> tuple[int, int]:
    """Rows, and elements of a row; a scalar is one row of one element."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def longest_rows(layout: GroupLayout) -> int:
    """Sum over segments of the elements of their longest row."""
    longest = [0] * len(layout.chunks)
    for extent in layout.extents:
        longest[extent.segment] = max(longest[extent.segment], extent.row_numel)
    return sum(longest)


def assert_tiles(ranges: list[RowRange], rows: int) -> None:
    """The ranges, in order, cover ``rows`` rows once; empty ones may stand anywhere inside."""
    cursor = 0
    for part in ranges:
        assert part.count >= 0
        assert 0 <= part.start <= rows
        if part.count:
            assert part.start == cursor
            cursor += part.count
    assert cursor == rows


@settings(deadline=None, max_examples=200)
@given(SHAPES, WORLD)
def test_ranks_tile_every_parameter_for_every_coarser_cut(shapes: list[Shape], world: int) -> None:
    layout = plan_layout(shapes, world)
    for shards in (cut for cut in range(1, world + 1) if world % cut == 0):
        for param, shape in enumerate(shapes):
            assert_tiles([layout.split(param, shards).range(index) for index in range(shards)], rows_of(shape)[0])


@settings(deadline=None, max_examples=200)
@given(SHAPES, WORLD)
def test_parameters_are_contiguous_and_apart(shapes: list[Shape], world: int) -> None:
    layout = plan_layout(shapes, world)
    taken = sorted(
        (layout.full_offset(param), math.prod(rows_of(shape)))
        for param, shape in enumerate(shapes)
        if math.prod(rows_of(shape))
    )
    end = 0
    for offset, numel in taken:
        assert offset >= end
        end = offset + numel
    assert end <= layout.full_numel
    assert layout.param_numel == sum(numel for _, numel in taken)
    assert layout.padding == layout.full_numel - layout.param_numel


@settings(deadline=None, max_examples=200)
@given(SHAPES, WORLD)
def test_no_chunk_border_cuts_a_row(shapes: list[Shape], world: int) -> None:
    layout = plan_layout(shapes, world)
    for param, shape in enumerate(shapes):
        rows, row_numel = rows_of(shape)
        extent = layout.extents[param]
        for border in range(0, layout.chunk(extent.segment, 1) + 1, max(layout.chunks[extent.segment], 1)):
            inside = border - extent.offset
            if 0 < inside < rows * row_numel:
                assert inside % row_numel == 0


@settings(deadline=None, max_examples=200)
@given(SHAPES, WORLD)
def test_local_offsets_point_at_the_rows_of_the_split(shapes: list[Shape], world: int) -> None:
    """Reading a rank's rows at their local offset gives what the gathered buffer holds at those rows."""
    layout = plan_layout(shapes, world)
    for shards in {1, world}:
        for index in range(shards):
            for param in range(len(shapes)):
                extent = layout.extents[param]
                part = layout.split(param, shards).range(index)
                size = part.count * extent.row_numel
                if not size:
                    continue
                chunk = layout.chunk(extent.segment, shards)
                local = layout.local_offset(param, shards, index)
                assert local >= 0
                assert local + size <= chunk
                assert index * chunk + local == extent.offset + part.start * extent.row_numel


@settings(deadline=None, max_examples=200)
@given(SHAPES, st.sampled_from([(2, 2), (2, 3), (3, 2), (4, 3), (1, 4), (4, 1)]))
def test_nested_cut_is_the_flat_cut_in_two_steps(shapes: list[Shape], sizes: tuple[int, int]) -> None:
    shards, pieces = sizes
    layout = plan_layout(shapes, shards * pieces)
    for param in range(len(shapes)):
        flat = [layout.split(param, shards * pieces).range(index) for index in range(shards * pieces)]
        for index in range(shards):
            outer = layout.split(param, shards).range(index)
            nested = layout.nested_split(param, shards, index, pieces)
            parts = [nested.range(piece) for piece in range(pieces)]
            assert_tiles(parts, outer.count)
            for piece, part in enumerate(parts):
                expected = flat[index * pieces + piece]
                assert part.count == expected.count
                if part.count:
                    assert outer.start + part.start == expected.start


@settings(deadline=None, max_examples=200)
@given(SHAPES, WORLD)
def test_padding_is_at_most_one_percent_and_a_row_per_rank_and_segment(shapes: list[Shape], world: int) -> None:
    layout = plan_layout(shapes, world)
    if world == 1:
        assert layout.padding == 0
    assert layout.padding <= 0.01 * layout.param_numel + world * longest_rows(layout)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("common", [360, 840, 2520, 5040])
@pytest.mark.parametrize("ones", [1, 90, 420, 3780, 6300])
def test_padding_bound_where_gaps_between_row_sizes_add_up(common: int, ones: int, world: int) -> None:
    """Row sizes that all divide a common one, but not each other: a shared segment would have a gap at each of them."""
    shapes = [(1, row) for row in range(2, common + 1) if common % row == 0] + [(ones, 1)]
    layout = plan_layout(shapes, world)
    assert layout.padding <= 0.01 * layout.param_numel + world * longest_rows(layout)


@settings(deadline=None, max_examples=200)
@given(SHAPES, WORLD)
def test_aligned_rows_start_aligned_in_the_gathered_buffer(shapes: list[Shape], world: int) -> None:
    layout = plan_layout(shapes, world)
    for param, shape in enumerate(shapes):
        rows, row_numel = rows_of(shape)
        if rows and row_numel and row_numel % ALIGNMENT == 0:
            assert layout.full_offset(param) % ALIGNMENT == 0


@settings(deadline=None, max_examples=100)
@given(SHAPES, WORLD)
def test_plan_depends_on_the_arguments_alone(shapes: list[Shape], world: int) -> None:
    """Every rank plans for itself, so the plan may depend on nothing else; it also survives pickling."""
    layout = plan_layout(shapes, world)
    assert plan_layout([list(shape) for shape in shapes], world) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize("world", [1, 2, 5])
def test_parameters_without_elements_belong_to_the_first_rank(world: int) -> None:
    shapes = [(0, 8), (8, 0), (3, 4), (0,)]
    layout = plan_layout(shapes, world)
    assert [layout.split(1, world).range(index).count for index in range(world)] == [8] + [0] * (world - 1)
    assert all(layout.split(param, world).range(index).count == 0 for param in (0, 3) for index in range(world))
    assert layout.param_numel == 12


def test_a_group_of_nothing_has_no_elements() -> None:
    assert plan_layout([], 4).full_numel == 0
    assert plan_layout([(0, 3), (3, 0)], 4).full_numel == 0


def test_more_ranks_than_rows_leaves_ranks_without_any() -> None:
    layout = plan_layout([(3, 4)], 8)
    assert sorted(layout.split(0, 8).range(index).count for index in range(8)) == [0, 0, 0, 0, 0, 1, 1, 1]


def test_same_shapes_share_one_segment_and_coprime_rows_do_not() -> None:
    assert len(plan_layout([(64, 8), (32, 8), (8,)], 4).chunks) == 1
    assert len(plan_layout([(64, 4096), (64, 4097)], 4).chunks) == 2


@pytest.mark.parametrize("world", [0, -1])
def test_world_must_be_positive(world: int) -> None:
    with pytest.raises(ValueError, match=f"world must be positive, got {world}"):
        plan_layout([(2, 2)], world)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, -1\)"):
        plan_layout([(3,), (2, -1)], 2)
