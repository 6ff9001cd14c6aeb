"""The next unit is predicted from the last complete pass."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp_v2.runtime.order import OrderRecorder


def run(recorder: OrderRecorder, units: str) -> list[Any]:
    """Predictions made while the units (one letter each) run in this order."""
    recorder.begin()
    predictions = [recorder.note(cast(Any, unit)) for unit in units]
    recorder.commit()
    return predictions


def test_the_first_pass_predicts_nothing() -> None:
    assert run(OrderRecorder(), "abc") == [None, None, None]


def test_a_repeated_pass_is_predicted() -> None:
    recorder = OrderRecorder()
    run(recorder, "abc")
    assert run(recorder, "abc") == ["b", "c", None]


def test_a_unit_that_runs_twice() -> None:
    recorder = OrderRecorder()
    run(recorder, "abbac")
    assert run(recorder, "abbac") == ["b", "b", "a", "c", None]


def test_a_skipped_unit_costs_one_prediction() -> None:
    recorder = OrderRecorder()
    run(recorder, "abcd")
    assert run(recorder, "acd") == ["b", "d", None]
    assert run(recorder, "acd") == ["c", "d", None]


def test_an_unknown_unit_predicts_nothing_and_loses_nothing() -> None:
    recorder = OrderRecorder()
    run(recorder, "abc")
    assert run(recorder, "axbc") == ["b", None, "c", None]


def test_an_unfinished_pass_is_forgotten() -> None:
    recorder = OrderRecorder()
    run(recorder, "abc")
    recorder.begin()
    recorder.note(cast(Any, "c"))
    assert run(recorder, "abc") == ["b", "c", None]


def test_an_empty_pass_changes_nothing() -> None:
    recorder = OrderRecorder()
    run(recorder, "ab")
    run(recorder, "")
    assert run(recorder, "ab") == ["b", None]


def test_a_supposed_order_serves_until_a_pass_was_recorded() -> None:
    recorder = OrderRecorder()
    recorder.suppose(cast(Any, "cba"))
    assert run(recorder, "cba") == ["b", "a", None]
    recorder.suppose(cast(Any, "xyz"))
    assert run(recorder, "cba") == ["b", "a", None]


@given(st.lists(st.text("abcd", max_size=8), max_size=6), st.text("abcd", min_size=1, max_size=8))
def test_whatever_came_before_a_repeated_pass_is_predicted(earlier: list[str], last: str) -> None:
    recorder = OrderRecorder()
    for units in earlier:
        run(recorder, units)
    run(recorder, last)
    assert run(recorder, last) == [*last[1:], None]
