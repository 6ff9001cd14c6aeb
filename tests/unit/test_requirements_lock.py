"""requirements.lock is a plain list of pins that satisfies pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "requirements.lock").read_text().splitlines()


def test_every_line_is_a_plain_pin() -> None:
    assert [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!+]*", line)] == []
    names = [canonicalize_name(line.split("==")[0]) for line in LINES]
    assert len(names) == len(set(names))


def test_the_pins_satisfy_the_project() -> None:
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in LINES)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    needed = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(line for extra in ("mcore", "cli", "dev") for line in extras[extra]),
    ]
    for requirement in map(Requirement, needed):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} has no pin"
        assert requirement.specifier.contains(pin), f"{requirement} is not met by {pin}"
