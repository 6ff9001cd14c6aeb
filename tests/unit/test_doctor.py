"""What `mfsdp2 doctor` finds, and that a run on an environment that can't work ends early with a line per reason."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron_fsdp_v2_mcore import environment, patches, signatures
from megatron_fsdp_v2_mcore.bootstrap import ENV_CPU_EMULATION, ENV_DISABLE, FLAG
from megatron_fsdp_v2_mcore.cli import doctor
from megatron_fsdp_v2_mcore.cli.main import app
from typer.testing import CliRunner

needs_megatron = pytest.mark.skipif(signatures.module_file("megatron.core") is None, reason="megatron-core is absent")

BROKEN_TE = {"transformer_engine/__init__.py": "raise FileNotFoundError('no libtransformer_engine.so\\nin any folder')"}
PARTIAL_TE = {"transformer_engine/__init__.py": ""}
OLD_MEGATRON = {
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 18\nPATCH = 1\nPRE_RELEASE = ''\n",
}

Install = Callable[[dict[str, str]], Path]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts files before everything else on `sys.path`, as if nothing had been imported yet."""
    for variable in (ENV_CPU_EMULATION, ENV_DISABLE):
        monkeypatch.delenv(variable, raising=False)
    for package in ("megatron", "transformer_engine", "apex"):
        # Set first, so that what a test imports is forgotten afterwards.
        monkeypatch.setitem(sys.modules, package, sys.modules.get(package))
        monkeypatch.delitem(sys.modules, package)

    def put(files: dict[str, str]) -> Path:
        monkeypatch.syspath_prepend(str(write(tmp_path, files)))
        importlib.invalidate_caches()
        return tmp_path

    return put


def component(name: str) -> environment.Component:
    return next(found for found in environment.survey() if found.name == name)


@needs_megatron
def test_a_complete_environment_has_no_problems(install: Install) -> None:
    report = doctor.examine()
    assert report["problems"] == []
    assert [row["status"] for row in report["patches"]] == ["ok"] * len(patches.PATCHES)
    assert report["available"]["training with v2 under CPU emulation"] == "yes"
    assert {found["name"] for found in report["components"]} >= {"Python", "torch", "megatron-core", "GPU", "NCCL"}


def test_another_megatron_is_named_with_its_version(install: Install) -> None:
    folder = install(OLD_MEGATRON)
    assert environment.v2_problems() == [f"megatron-core 0.19 is needed; {folder / 'megatron/core'} is 0.18.1"]
    assert component("megatron-core").state == "unsupported"
    assert component("megatron-core").version == "0.18.1"


def test_a_megatron_without_a_version_is_refused_too(install: Install) -> None:
    install({**OLD_MEGATRON, "megatron/core/package_info.py": "VERSION = read_it_from_somewhere()"})
    assert environment.v2_problems()[0].endswith("doesn't say which version it is")


def test_a_missing_megatron_comes_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "module_file", lambda name: None)
    report = doctor.examine()
    assert report["problems"][0].endswith("pip install 'megatron-fsdp-v2[mcore]'")
    assert report["available"]["training with v2 under CPU emulation"] == "no: see the problems"


@needs_megatron
def test_a_broken_transformer_engine_is_a_problem_unless_it_is_hidden(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(BROKEN_TE)
    found = component("transformer-engine")
    assert found.state == "half-installed"
    assert found.detail.startswith("FileNotFoundError: no libtransformer_engine.so; ")
    (problem,) = environment.v2_problems()
    assert "half-installed (FileNotFoundError: no libtransformer_engine.so)" in problem
    assert problem.endswith("pip uninstall transformer-engine")
    monkeypatch.setenv(ENV_CPU_EMULATION, "1")
    assert component("transformer-engine").state == "hidden"
    assert environment.v2_problems() == []


@needs_megatron
def test_a_transformer_engine_without_its_torch_part_is_only_reported(install: Install) -> None:
    install(PARTIAL_TE)
    assert component("transformer-engine").state == "half-installed"
    assert environment.v2_problems() == []


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({"apex/__init__.py": "1 / 0", "apex/optimizers/__init__.py": ""}, "present"),
        ({"apex/__init__.py": "1 / 0"}, "unrelated"),
    ],
)
def test_apex_is_told_from_its_namesake_without_importing_it(
    install: Install, files: dict[str, str], state: str
) -> None:
    install(files)
    assert component("apex").state == state
    assert "apex" not in sys.modules


def test_an_old_python_and_an_old_torch_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fsdp_v2_mcore.bootstrap.OLDEST_PYTHON", (3, 99))
    monkeypatch.setattr(environment, "installed_version", lambda name: "2.10.1+cu128")
    problems = environment.v2_problems()
    assert any(problem.startswith("Python 3.99 or newer is needed, this is ") for problem in problems)
    assert "torch 2.11 or newer is needed, this is 2.10.1+cu128" in problems
    assert (component("Python").state, component("torch").state) == ("unsupported", "unsupported")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


@needs_megatron
def test_a_moved_row_is_shown_and_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("--json").exit_code == 0
    first, *others = patches.PATCHES
    monkeypatch.setattr(patches, "PATCHES", (replace(first, signature="(parser, more)"), *others))
    done = invoke("--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 1
    assert report["patches"][0]["status"] == "moved"
    assert report["patches"][0]["found"] == "(parser)"
    assert report["problems"] == [f"{first.target} has moved: expected (parser, more), found (parser)"]
    text = invoke()
    assert text.exit_code == 1
    assert "expected (parser, more)" in text.stdout
    assert "problem" in text.stdout


def test_the_activation_file_is_looked_for_and_the_switch_named(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"activation by {environment.ACTIVATION_FILE}"
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path / "user"))
    assert component(name).state == "absent"
    (tmp_path / environment.ACTIVATION_FILE).touch()
    assert component(name).state == "present"
    monkeypatch.setenv(ENV_DISABLE, "1")
    assert component(name).state == "hidden"


@needs_megatron
@pytest.mark.parametrize(
    ("files", "words"),
    [(OLD_MEGATRON, "megatron-core 0.19 is needed"), (BROKEN_TE, "transformer-engine is half-installed")],
)
def test_a_run_that_cannot_work_ends_with_one_line(tmp_path: Path, files: dict[str, str], words: str) -> None:
    write(tmp_path, files)
    script = tmp_path / "train.py"
    script.write_text("import megatron.core\nprint('trained')\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_FSDP_V2")}
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fsdp_v2_mcore.cli", "run", str(script), FLAG],
        env={**clean, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("megatron_fsdp_v2: ")
    assert words in line
