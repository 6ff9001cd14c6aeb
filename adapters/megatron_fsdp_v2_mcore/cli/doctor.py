"""`mfsdp2 doctor`: what is installed, whether Megatron is as the patch table expects it, and what can run."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import environment, patches, signatures
from ..environment import Component

_COLOURS = {"present": "green", "ok": "green", "absent": "yellow", "hidden": "yellow", "unrelated": "yellow"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Say what is installed, where Megatron gets touched, and what can run here.

    The exit code is 1 if --use-megatron-fsdp-v2 can't work.
    """
    report = examine()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print(report)
    if report["problems"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Everything that is printed: `components`, `patches`, `available` (name to yes or why not) and `problems`."""
    components = environment.survey()
    problems = environment.v2_problems()
    v2_rows = [row for row in patches.PATCHES if patches.V2 in row.modes]
    problems += signatures.moved(v2_rows) if environment.megatron_version() else []
    by_name = {component.name: component for component in components}
    if not problems and not _usable(by_name, "gloo") and not (_usable(by_name, "GPU") and _usable(by_name, "NCCL")):
        problems.append("torch has neither gloo nor a GPU with NCCL, so ranks can't communicate")
    return {
        "components": [asdict(component) for component in components],
        "patches": [_examine_row(row) for row in patches.PATCHES],
        "available": _available(by_name, problems),
        "problems": problems,
    }


def _examine_row(row: patches.Patch) -> dict[str, Any]:
    status, found = signatures.check(row)
    return {**asdict(row), "status": status, "found": found}


def _usable(components: dict[str, Component], name: str) -> bool:
    return components[name].state == "present"


def _available(components: dict[str, Component], problems: list[str]) -> dict[str, str]:
    """What can be done here: "yes", or what is missing."""

    def needs(*names: str) -> str:
        missing = [name for name in names if not _usable(components, name)]
        return "no: " + ", ".join(f"{name} {components[name].state}" for name in missing) if missing else "yes"

    blocked = "no: see the problems" if problems else None
    fused_adam = "yes" if "yes" in (needs("transformer-engine"), needs("apex")) else "no: torch's Adam is used"
    return {
        "training with v2 on GPUs": blocked or needs("GPU", "NCCL"),
        "training with v2 under CPU emulation": blocked or needs("gloo"),
        "transformer-engine layers and fp8": needs("GPU", "transformer-engine"),
        "fused Adam": fused_adam,
        "emerging optimizers (Muon)": needs("emerging-optimizers"),
        "torch_dist checkpoints": needs("psutil"),
    }


def _print(report: dict[str, Any]) -> None:
    console = Console()
    found = _table("Found", "component", "state", "version", "")
    for component in report["components"]:
        version, detail = component["version"] or "", escape(component["detail"])
        found.add_row(component["name"], _coloured(component["state"]), version, detail)
    touched = _table("Touched places of megatron-core", "state", "place")
    for row in report["patches"]:
        place = f"{row['module']}.{row['attribute']} ({row['kind']}; {', '.join(row['modes'])})\n{row['reason']}"
        if row["status"] == "moved":
            place += f"\nexpected {row['signature']}\nfound {row['found'] or 'no such name'}"
        touched.add_row(_coloured(row["status"]), escape(place))
    possible = _table("What can run here", "", "")
    for name, answer in report["available"].items():
        possible.add_row(name, _coloured("ok", answer) if answer == "yes" else escape(answer))
    for table in (found, touched, possible):
        console.print(table)
    for problem in report["problems"]:
        console.print(f"[red]problem[/red] {escape(problem)}", soft_wrap=True)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_header=any(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _coloured(state: str, text: str | None = None) -> str:
    colour = _COLOURS.get(state, "red")
    return f"[{colour}]{text or state}[/{colour}]"
