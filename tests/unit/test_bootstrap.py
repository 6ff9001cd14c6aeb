"""Activation at interpreter start: who pays, who is patched, and that nothing here can break an interpreter."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_fsdp_v2_mcore import bootstrap, import_hook

ADAPTERS = Path(__file__).resolve().parents[2] / "adapters"
PTH = ADAPTERS / "megatron_fsdp_v2_activate.pth"
FLAG = bootstrap.FLAG

# What `site` does with the file, in an interpreter that has imported nothing else.
_START = f"""
import os, sys
sys.path.insert(0, {{packages!r}})
before = set(sys.modules)
exec(open({str(PTH)!r}).read())
"""


def start(script: str, *arguments: str, packages: Path = ADAPTERS, env: dict[str, str] | None = None):
    """Run the `.pth` line and then `script` in a fresh interpreter without site-packages."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_FSDP_V2")}
    return subprocess.run(
        [sys.executable, "-S", "-c", _START.format(packages=str(packages)) + script, *arguments],
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
    )


_MODES = """
hook = next((f for f in sys.meta_path if type(f).__name__ == "MegatronImportHook"), None)
print(sorted(hook.modes) if hook else None, "torch" in sys.modules)
"""


def test_without_the_flag_only_the_bootstrap_is_imported() -> None:
    done = start("print(sorted(set(sys.modules) - before))")
    assert ast.literal_eval(done.stdout) == ["__future__", "megatron_fsdp_v2_mcore", "megatron_fsdp_v2_mcore.bootstrap"]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "env", "modes"),
    [
        ([], {}, "None"),
        (["train.py", FLAG], {}, "['v2']"),
        ([], {bootstrap.ENV_ACTIVE: "1"}, "['v2']"),
        ([], {bootstrap.ENV_CPU_EMULATION: "1"}, "['cpu-emulation']"),
        ([], {bootstrap.ENV_CPU_EMULATION: "0"}, "None"),
        ([FLAG], {bootstrap.ENV_CPU_EMULATION: "force"}, "['cpu-emulation', 'v2']"),
        ([FLAG], {bootstrap.ENV_DISABLE: "1", bootstrap.ENV_CPU_EMULATION: "1"}, "None"),
        ([FLAG], {bootstrap.ENV_DISABLE: "0"}, "['v2']"),
        ([FLAG + "-not"], {}, "None"),
    ],
)
def test_who_gets_the_hook(arguments: list[str], env: dict[str, str], modes: str) -> None:
    done = start(_MODES, *arguments, env=env)
    assert (done.stdout.strip(), done.stderr) == (f"{modes} False", "")


def test_children_without_the_flag_on_their_command_line_are_covered() -> None:
    inner = _START.format(packages=str(ADAPTERS)) + _MODES
    done = start(f"import subprocess; subprocess.run([sys.executable, '-S', '-c', {inner!r}])", FLAG)
    assert done.stdout.strip() == "['v2'] False"


@pytest.mark.parametrize("remains", ["nothing", "empty package", "broken module"])
def test_a_half_removed_package_breaks_nothing(tmp_path: Path, remains: str) -> None:
    package = tmp_path / "megatron_fsdp_v2_mcore"
    if remains != "nothing":
        package.mkdir()
        (package / "__init__.py").touch()
    if remains == "broken module":
        (package / "bootstrap.py").write_text("this is not Python")
    silent = start("print('alive')", packages=tmp_path)
    assert (silent.stdout, silent.stderr, silent.returncode) == ("alive\n", "", 0)
    asked = start("print('alive')", FLAG, packages=tmp_path)
    assert (asked.stdout, asked.returncode) == ("alive\n", 0)
    assert asked.stderr.count("\n") == 1
    assert asked.stderr.startswith("megatron_fsdp_v2 is not active: ")


def test_a_python_that_is_too_old_gets_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST_PYTHON", (3, 99))
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", FLAG])
    bootstrap.activate()
    assert import_hook.installed_hook() is None
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert (
        capsys.readouterr().err == f"megatron_fsdp_v2 is not active: Python 3.99 or newer is needed, this is {here}\n"
    )


@pytest.mark.parametrize("file", ["__init__.py", "bootstrap.py"])
def test_older_interpreters_can_read_it_as_far_as_that_line(file: str) -> None:
    source = (ADAPTERS / "megatron_fsdp_v2_mcore" / file).read_text()
    ast.parse(source, feature_version=(3, 7))


def test_the_pth_file_is_one_line_that_site_executes() -> None:
    text = PTH.read_text()
    assert text.count("\n") == 1
    assert text.startswith("import ")
