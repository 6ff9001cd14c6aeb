"""The progress line reads what stock's training loop prints."""

from __future__ import annotations

import io
import math

import pytest
from megatron_fsdp_v2_mcore.demo.progress import ProgressLine, RunState, describe
from rich.console import Console


def step_line(step: int, total: int, ms: float, loss: str = "lm loss: 2.500000E+00 | ") -> str:
    return (
        f" [2026-01-01 00:00:00.000000] iteration {step:8d}/{total:8d} | consumed samples: {16 * step:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.000000E-03 | global batch size:    16 |"
        f" {loss}loss scale: 1.0 | grad norm: 10.552 | number of skipped iterations:   0 |"
    )


VALIDATION = (
    " validation loss at iteration 10 on validation set | lm loss value: 3.970127E+00 | lm loss PPL: 5.3E+01 | "
)


def test_a_step_line_gives_step_loss_pace_and_time_left() -> None:
    state = RunState()
    assert state.read(step_line(1, 100, 4000.0, "lm loss: 5.878164E+00 | "))
    for step in range(2, 41):
        assert state.read(step_line(step, 100, 500.0))
    assert (state.step, state.total, state.phase) == (40, 100, "training")
    assert state.losses[:2] == [5.878164, 2.5]
    assert state.steps_per_second() == pytest.approx(2.0)
    assert state.seconds_left() == pytest.approx(30.0)
    assert describe(state) == "step 40/100  loss 2.500  2.00 steps/s  0:30 left"


def test_the_time_left_follows_the_recent_pace() -> None:
    state = RunState()
    for step in range(1, 41):
        state.read(step_line(step, 60, 500.0 if step <= 20 else 1000.0))
    assert state.seconds_left() == pytest.approx(20.0)


def test_the_validation_loss_is_not_taken_for_a_training_loss() -> None:
    state = RunState()
    state.read(step_line(10, 10, 500.0))
    assert state.phase == "validating"
    assert state.read(VALIDATION)
    assert state.validation_loss == pytest.approx(3.970127)
    assert state.losses == [2.5]


def test_a_skipped_step_has_no_loss() -> None:
    state = RunState()
    state.read(step_line(1, 10, 500.0, loss=""))
    assert math.isnan(state.losses[0])


def test_other_lines_tell_the_phase_or_nothing() -> None:
    state = RunState()
    assert not state.read("")
    assert not state.read("WARNING: something else about an iteration")
    assert state.read("> initializing torch distributed ...")
    assert describe(state) == "connecting the ranks"


def test_without_a_terminal_a_line_is_printed_only_now_and_then() -> None:
    now = 0.0
    printed = io.StringIO()
    line = ProgressLine(Console(file=printed, width=100), clock=lambda: now)
    state = RunState()
    with line:
        for step in range(1, 101):
            now = 0.5 * step
            state.read(step_line(step, 100, 500.0))
            line.show(state)
            line.show(state)
    shown = printed.getvalue().splitlines()
    assert [text.split("  ")[0] for text in shown] == [f"step {step}/100" for step in (1, 21, 41, 61, 81)]


def test_on_a_terminal_the_line_stays_at_the_last_step() -> None:
    printed = io.StringIO()
    state = RunState()
    with ProgressLine(Console(file=printed, force_terminal=True, width=100)) as line:
        for step in (1, 2, 3):
            state.read(step_line(step, 3, 500.0))
            line.show(state)
    assert "step 3/3" in printed.getvalue()
