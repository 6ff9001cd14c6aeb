"""Results as tables, printed in Markdown so that they can go into the docs as they are."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich import box
from rich.table import Table

from .results import PLAIN, HostFigures, StepFigures, StepResult

MIB = 2**20
# What is required of ZeRO-3 against FSDP2.
PAYLOAD_LIMIT = 1.01
COPY_LIMIT = 1.5


def exact_table(result: StepResult) -> Table:
    """Collectives, payload, copied bytes and peak memory of every variant."""
    columns = ["", "collectives", "payload MiB", "to peer", "copied / P", "of it by gloo", "peak MiB", "to peer"]
    table = markdown_table(
        f"Per step and rank, exact; P = {result.parameter_bytes / MIB:.1f} MiB of fp32 parameters", columns
    )
    for figures in result.variants:
        peer = result.of(figures.peer) if figures.peer else None
        table.add_row(
            figures.name,
            ", ".join(f"{calls} {kind}" for kind, calls in sorted(figures.calls.items())),
            " + ".join(f"{size / MIB:.1f}" for _, size in sorted(figures.payload.items())),
            _ratio(_payload(figures), peer and _payload(peer), digits=4),
            f"{figures.copied / result.parameter_bytes:.2f}",
            f"{figures.copied_by_backend / result.parameter_bytes:.2f}",
            f"{figures.peak_bytes / MIB:.1f}",
            _ratio(figures.peak_bytes, peer and peer.peak_bytes),
        )
    return table


def time_table(result: StepResult) -> Table:
    """Wall and CPU time of every variant, and their ratios to the peer's within the run."""
    rounds = len(result.variants[0].seconds)
    columns = [
        "",
        "ms, least",
        "median",
        "peer",
        "ratio of least",
        "of medians",
        "median of pairs",
        "CPU ms, least",
        "ratio",
    ]
    table = markdown_table(f"Time per step, {rounds} interleaved rounds", columns)
    for figures in result.variants:
        peer = result.of(figures.peer) if figures.peer else None
        pairs = [a / b for a, b in zip(figures.seconds, peer.seconds, strict=True)] if peer else []
        table.add_row(
            figures.name,
            f"{min(figures.seconds) * 1e3:.0f}",
            f"{median(figures.seconds) * 1e3:.0f}",
            figures.peer or "",
            _ratio(min(figures.seconds), peer and min(peer.seconds)),
            _ratio(median(figures.seconds), peer and median(peer.seconds)),
            f"{median(pairs):.2f}" if pairs else "",
            f"{min(figures.cpu_seconds) * 1e3:.0f}",
            _ratio(min(figures.cpu_seconds), peer and min(peer.cpu_seconds)),
        )
    return table


def copy_table(result: StepResult) -> Table:
    """Which operators write what each variant copies."""
    table = markdown_table("Bytes written beyond the plain model's, by operator, in P", ["", "operators"])
    for figures in result.variants:
        parts = [
            f"{name} {size / result.parameter_bytes:.2f}"
            for name, size in figures.copied_by_operator.items()
            if abs(size) >= result.parameter_bytes / 200
        ]
        table.add_row(figures.name, ", ".join(parts))
    return table


def host_table(figures: Sequence[HostFigures]) -> Table:
    """CPU microseconds per unit and their ratios to FSDP2's, once as they are and once without the plain modules'."""
    by_name = {row.name: row for row in figures}
    columns = [
        "us per unit",
        "forward, least",
        "median",
        "ratio",
        "of overhead",
        "backward, least",
        "median",
        "ratio",
        "of overhead",
    ]
    table = markdown_table(
        f"Host time, {len(figures[0].forward)} interleaved rounds; ratios of the least to FSDP2's", columns
    )
    plain, theirs = by_name[PLAIN], by_name["FSDP2"]
    for row in figures:
        cells = []
        for mine, own, other in (
            (row.forward, plain.forward, theirs.forward),
            (row.backward, plain.backward, theirs.backward),
        ):
            least, base, peer = min(mine), min(own), min(other)
            compared = row is not plain and row is not theirs
            cells += [
                f"{least:.0f}",
                f"{median(mine):.0f}",
                f"{least / peer:.2f}" if compared else "",
                f"{(least - base) / (peer - base):.2f}" if compared else "",
            ]
        table.add_row(row.name, *cells)
    return table


def requirements(result: StepResult) -> list[tuple[str, bool]]:
    """Each exact requirement with its figure, and whether it is met."""
    mine, peer = result.of("v2 ZeRO-3"), result.of("FSDP2")
    payload = _payload(mine) / _payload(peer)
    copied = (mine.copied - mine.copied_by_backend) / result.parameter_bytes
    return [
        (f"collectives {mine.calls}, of FSDP2 {peer.calls}: equal", mine.calls == peer.calls),
        (f"payload {payload:.4f} of FSDP2's: at most {PAYLOAD_LIMIT}", payload <= PAYLOAD_LIMIT),
        (f"copied {copied:.3f} P, without gloo's own: at most {COPY_LIMIT}", copied <= COPY_LIMIT),
    ]


def markdown_table(title: str, columns: Sequence[str]) -> Table:
    """An empty table that prints as Markdown."""
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for column in columns:
        table.add_column(column)
    return table


def _payload(figures: StepFigures) -> int:
    return sum(figures.payload.values())


def _ratio(value: float, peer: float | None, digits: int = 2) -> str:
    return f"{value / peer:.{digits}f}" if peer else ""
