"""How `make setup` chooses its Python, tried with stand-ins for interpreters in a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("python3.12", "python3.13", "python3.14", "python3", "python")
SHIM_WITHOUT_VERSION = "exit 127"
# Says its version, and refuses whatever asks for another one or for a module.
OLD = 'case "$2" in *python_version*) echo 3.10.4 ;; *) exit 1 ;; esac'
NO_VENV = 'case "$2" in *ensurepip*) exit 1 ;; *python_version*) echo 3.12.9 ;; esac'
# Usable, but the environment itself isn't created here.
GOOD = f'[ "$2" = venv ] && exit 7; exec "{sys.executable}" "$@"'

Setup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "scripts" / "setup", tmp_path / "scripts")

    def run(env: dict[str, str] | None = None, **interpreters: str) -> subprocess.CompletedProcess[str]:
        for name in NAMES:
            body = interpreters.get(name.replace(".", "_"), SHIM_WITHOUT_VERSION)
            path = tmp_path / "bin" / name
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(0o755)
        (tmp_path / "bin" / "uv").symlink_to("/bin/false")
        environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path), **(env or {})}
        command = [str(tmp_path / "scripts" / "setup")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


def test_without_a_usable_python_it_says_what_it_tried_and_what_to_do(setup: Setup, tmp_path: Path) -> None:
    done = setup(python3=OLD)
    assert done.returncode == 1
    assert f"{tmp_path}/bin/python3.12: does not run" in done.stderr
    assert f"{tmp_path}/bin/python3: Python 3.10.4 is too old" in done.stderr
    assert "apt install python3.12 python3.12-venv" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_a_python_without_venv_is_named_with_its_package(setup: Setup) -> None:
    done = setup(python3_12=NO_VENV)
    assert done.returncode == 1
    assert "Python 3.12.9 lacks the venv module (Debian, Ubuntu: apt install python3.12-venv)" in done.stderr


def test_it_passes_over_old_and_broken_ones(setup: Setup, tmp_path: Path) -> None:
    done = setup(python3_12=SHIM_WITHOUT_VERSION, python3_13=OLD, python3=GOOD)
    assert done.returncode == 7
    assert f"creating .venv with {tmp_path}/bin/python3 (" in done.stdout


def test_it_finds_a_pyenv_version_that_is_not_on_the_path(setup: Setup, tmp_path: Path) -> None:
    folder = tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin"
    folder.mkdir(parents=True)
    (folder / "python3").write_text(f"#!/bin/sh\n{GOOD}\n")
    (folder / "python3").chmod(0o755)
    assert f"creating .venv with {folder}/python3 (" in setup().stdout


def test_a_given_python_is_the_only_candidate(setup: Setup, tmp_path: Path) -> None:
    done = setup(env={"PYTHON": "python3"}, python3=OLD, python3_12=GOOD)
    assert done.returncode == 1
    assert "python3: Python 3.10.4 is too old" in done.stderr
    assert "python3.12: " not in done.stderr
