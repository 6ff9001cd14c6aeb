"""Unedited scripts under every way of starting them, in this environment and in freshly installed ones."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.command import Finished, run_command

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "tiny_gpt.py"
FLAG = "--use-megatron-fsdp-v2"
EMULATION = "MEGATRON_FSDP_V2_CPU_EMULATION"
MFSDP2 = (sys.executable, "-m", "megatron_fsdp_v2_mcore.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
STOCK_FLAGS = shlex.split("""
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
--micro-batch-size 2 --global-batch-size 8 --train-iters 3 --lr 1e-2 --min-lr 1e-3 --lr-decay-style constant
--clip-grad 1.0 --seed 1234 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-workers 0
--eval-iters 1 --eval-interval 1000 --log-interval 1
""")


@pytest.fixture(autouse=True)
def _nothing_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("MEGATRON_FSDP_V2")]:
        monkeypatch.delenv(variable)


def losses(finished: Finished) -> list[tuple[str, str]]:
    """(loss, gradient norm) of every step as the log prints them."""
    assert finished.returncode == 0, finished.output
    found = re.findall(r"lm loss: (\S+) .*grad norm: (\S+) ", finished.output)
    assert len(found) == 3, finished.output
    return found


def announcements(finished: Finished) -> int:
    return finished.output.count("CPU emulation is on")


def started_with(finished: Finished) -> list[dict[str, list[str]]]:
    return [json.loads(line) for line in re.findall(r"STARTED WITH (\{.*?\})", finished.output)]


@pytest.fixture(scope="module")
def stock() -> Finished:
    """The script under plain torchrun with nothing but the environment variable: stock's own optimizer."""
    flags = [*STOCK_FLAGS, "--use-distributed-optimizer"]
    return run_command([*TORCHRUN, str(SCRIPT), *flags], env={EMULATION: "1"})


def test_stock_trains_on_the_cpu_and_says_so_once(stock: Finished) -> None:
    steps = losses(stock)
    assert float(steps[-1][0]) < float(steps[0][0])
    assert announcements(stock) == 1


def test_the_flag_alone_changes_a_plain_torchrun(stock: Finished) -> None:
    finished = run_command([*TORCHRUN, str(SCRIPT), *STOCK_FLAGS, FLAG], env={EMULATION: "1"})
    assert losses(finished) == losses(stock)
    assert announcements(finished) == 1
    assert {name for start in started_with(stock) for name in start["wrappers"]} == {"DistributedDataParallel"}
    (wrapper,) = {name for start in started_with(finished) for name in start["wrappers"]}
    assert wrapper not in ("DistributedDataParallel", "FullyShardedDataParallel")


def test_mfsdp2_run_starts_ranks_and_passes_everything_on(stock: Finished) -> None:
    flags = [*STOCK_FLAGS, FLAG]
    finished = run_command(
        [*MFSDP2, "run", "--cpu-emulation", "--nproc", "2", str(SCRIPT), *flags], env={"MEGATRON_FSDP_V2_DISABLE": "0"}
    )
    assert losses(finished) == losses(stock)
    assert announcements(finished) == 1
    starts = started_with(finished)
    assert [start["argv"] for start in starts] == [flags, flags]
    assert {start["path"] for start in starts} == {str(SCRIPT.parent)}


def test_experts_exchange_tokens_on_the_cpu() -> None:
    experts = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-router-topk 2"
    flags = [*STOCK_FLAGS, *experts.split(), "--swiglu", "--disable-bias-linear", "--use-distributed-optimizer"]
    losses(run_command([*MFSDP2, "run", "--cpu-emulation", "--nproc", "2", str(SCRIPT), *flags]))


def test_a_gpu_flag_under_emulation_ends_with_one_line() -> None:
    finished = run_command(
        [*MFSDP2, "run", "--cpu-emulation", str(SCRIPT), *STOCK_FLAGS, "--distributed-backend", "nccl"]
    )
    assert finished.returncode == 1
    assert "Traceback" not in finished.output
    assert "--distributed-backend nccl needs a GPU" in finished.output


# From here on scripts need neither torch nor Megatron.
PROBE = """
import multiprocessing, subprocess, sys

def modes():
    hook = next((f for f in sys.meta_path if type(f).__name__ == "MegatronImportHook"), None)
    return sorted(hook.modes) if hook else None

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print([modes(), pool.apply(modes), sys.argv[1:]])
"""


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    script = tmp_path / "probe.py"
    script.write_text(PROBE)
    return script


def python(interpreter: Path | str, *arguments: object, env: dict[str, str] | None = None) -> str:
    """Standard output of an interpreter that has to succeed and say nothing on standard error."""
    done = subprocess.run(
        [str(interpreter), *map(str, arguments)],
        env={**os.environ, **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.strip()


def modes_seen(interpreter: Path | str, *arguments: object, env: dict[str, str] | None = None) -> list[object]:
    """What the probe printed: modes here, modes in a spawned child, arguments."""
    seen: list[object] = ast.literal_eval(python(interpreter, *arguments, env=env))
    return seen


def build(kind: str, folder: Path) -> Path:
    """An ordinary or an editable wheel of this project, built without a network."""
    code = f"import hatchling.build as b; print(b.build_{kind}({str(folder)!r}))"
    return folder / python(sys.executable, "-c", code).splitlines()[-1]


def pip(interpreter: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(interpreter), *arguments, "--quiet"]
    subprocess.run(command, check=True, timeout=120, capture_output=True)


needs_builder = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("hatchling", "editables", "pip")),
    reason="building wheels needs hatchling, editables and pip",
)


@needs_builder
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_installed_package_activates_itself_and_leaves_without_a_trace(
    kind: str, tmp_path: Path, probe: Path
) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    interpreter = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip(interpreter, "install", "--no-deps", "--no-index", str(build(kind, tmp_path)))

    assert modes_seen(interpreter, probe) == [None, None, []]
    assert modes_seen(interpreter, probe, FLAG) == [["v2"], ["v2"], [FLAG]]
    both = [["cpu-emulation", "v2"]] * 2
    assert modes_seen(interpreter, probe, FLAG, env={EMULATION: "1"}) == [*both, [FLAG]]
    assert modes_seen(interpreter, probe, FLAG, env={"MEGATRON_FSDP_V2_DISABLE": "1"}) == [None, None, [FLAG]]
    assert modes_seen(interpreter, "-S", probe, FLAG) == [None, None, [FLAG]]
    assert modes_seen(interpreter, "-I", probe, FLAG) == [["v2"], ["v2"], [FLAG]]
    assert python(interpreter, "-c", "import sys; print(sys.argv)", FLAG) == str(["-c", FLAG])
    assert python(interpreter, "-m", "this", FLAG).startswith("The Zen")

    pip(interpreter, "uninstall", "--yes", "megatron-fsdp-v2")
    assert list((tmp_path / "env").rglob("*megatron*")) == []
    assert modes_seen(interpreter, probe, FLAG) == [None, None, [FLAG]]


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(7)", 7, ""),
        ("raise OSError('disk is full')", 1, "OSError: disk is full"),
        ("raise KeyboardInterrupt", 130, ""),
        ("print('done', __name__, __file__)", 0, "done __main__ "),
    ],
)
def test_mfsdp2_run_ends_as_the_script_ends(tmp_path: Path, ending: str, code: int, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{ending}\n")
    finished = run_command([*MFSDP2, "run", str(script)])
    assert finished.returncode == code
    assert words in finished.output
    assert "Aborted" not in finished.output


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--nproc", "4"], ["--cpu-emulation"], ["-x", "--", "--y"], ["--a=b", "c d", "--force", ""]],
)
def test_mfsdp2_run_reads_nothing_behind_the_script(probe: Path, arguments: Sequence[str]) -> None:
    finished = run_command([*MFSDP2, "run", str(probe), FLAG, *arguments])
    assert ast.literal_eval(finished.output.strip()) == [["v2"], ["v2"], [FLAG, *arguments]]


def test_the_switch_turns_mfsdp2_run_off_too(probe: Path) -> None:
    finished = run_command([*MFSDP2, "run", str(probe), FLAG], env={"MEGATRON_FSDP_V2_DISABLE": "1"})
    reason, seen = finished.output.strip().splitlines()
    assert reason == "megatron_fsdp_v2 is not active: MEGATRON_FSDP_V2_DISABLE is set"
    assert ast.literal_eval(seen) == [None, None, [FLAG]]


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    finished = run_command([*MFSDP2, "run", str(tmp_path / "absent.py")])
    assert finished.returncode == 2
    assert "absent.py" in finished.output.replace("\n", "").replace("│", "")


def test_force_without_emulation_is_refused(probe: Path) -> None:
    finished = run_command([*MFSDP2, "run", "--force", str(probe)])
    assert finished.returncode == 2
    assert "--force belongs to --cpu-emulation" in finished.output


def test_without_the_flag_this_environment_imports_the_bootstrap_alone() -> None:
    code = "import sys; print([m for m in sys.modules if m.startswith(('torch', 'megatron'))])"
    assert python(sys.executable, "-c", code) == str(["megatron_fsdp_v2_mcore", "megatron_fsdp_v2_mcore.bootstrap"])
