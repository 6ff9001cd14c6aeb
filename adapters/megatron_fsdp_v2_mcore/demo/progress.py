"""From the log lines of stock's training loop to a live progress line."""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

STEP = re.compile(
    r"iteration\s+(?P<step>\d+)/\s*(?P<total>\d+) \|.*elapsed time per iteration \(ms\): (?P<ms>[\d.]+)"
    r"(?:.*?\blm loss: (?P<loss>\S+))?"
)
VALIDATION = re.compile(r"validation loss at .*?lm loss value: (?P<loss>\S+)")
PHASES = {
    "> initializing torch distributed": "connecting the ranks",
    "training ...": "training",
    "Evaluating on": "validating",
}
QUIET_SECONDS = 10.0
RECENT = 20


@dataclass
class RunState:
    """What the log has told so far. Losses are nats per token; NaN where a step was skipped."""

    phase: str = "starting: Megatron is loading"
    step: int = 0
    total: int = 0
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    validation_loss: float | None = None

    def read(self, line: str) -> bool:
        """Take in one log line; True when it told something new."""
        if match := STEP.search(line):
            self.step, self.total = int(match["step"]), int(match["total"])
            self.phase = "training" if self.step < self.total else "validating"
            self.step_ms.append(float(match["ms"]))
            self.losses.append(float(match["loss"] or "nan"))
            return True
        if match := VALIDATION.search(line):
            self.validation_loss = float(match["loss"])
            return True
        for text, phase in PHASES.items():
            if text in line:
                self.phase = phase
                return True
        return False

    def steps_per_second(self, recent: int | None = None) -> float | None:
        """From the median logged step time, without the first step, which pays for set-up."""
        times = self.step_ms[1:] or self.step_ms
        times = times[-recent:] if recent else times
        return 1000.0 / statistics.median(times) if times else None

    def seconds_left(self) -> float | None:
        """Estimated from the recent pace; None before the first step."""
        pace = self.steps_per_second(RECENT)
        return (self.total - self.step) / pace if pace else None


def describe(state: RunState) -> str:
    """The progress line as plain text."""
    if not state.losses:
        return state.phase
    parts = [f"step {state.step}/{state.total}", f"loss {state.losses[-1]:.3f}"]
    pace, left = state.steps_per_second(RECENT), state.seconds_left()
    if pace is not None:
        parts.append(f"{pace:.2f} steps/s")
    if state.phase != "training":
        parts.append(state.phase)
    elif left is not None:
        minutes, seconds = divmod(round(left), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(parts)


class ProgressLine:
    """Shows a :class:`RunState`: one live line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.clock = clock
        self.live = Live(console=console, refresh_per_second=8, transient=False) if console.is_terminal else None
        self.printed_at = -QUIET_SECONDS
        self.printed = ""
        self.spinner = Spinner("dots")

    def __enter__(self) -> "ProgressLine":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, state: RunState) -> None:
        """Bring the display up to date; cheap enough to be called several times a second."""
        if self.live:
            self.live.update(self._line(state))
            return
        now, text = self.clock(), describe(state)
        if text != self.printed and now - self.printed_at >= QUIET_SECONDS:
            self.printed_at, self.printed = now, text
            self.console.print(text, highlight=False)

    def _line(self, state: RunState) -> Table:
        line = Table.grid(padding=(0, 1))
        if state.total and state.phase == "training":
            line.add_row(ProgressBar(total=state.total, completed=state.step, width=24), describe(state))
        else:
            line.add_row(self.spinner, describe(state))
        return line
