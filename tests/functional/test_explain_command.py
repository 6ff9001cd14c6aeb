"""`mfsdp2 explain` on a stock script: a parsable explanation on standard output, and no step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.test_activation import SCRIPT, STOCK_FLAGS
from tests.harness.spawn import rank_environment

COMMAND = [sys.executable, "-m", "megatron_fsdp_v2_mcore.cli", "explain"]
LAYER = {"up and down": 2 * 4 * 32 * 32 + 5 * 32, "qkv and projection": 4 * 32 * 32 + 4 * 32, "norms": 4 * 32}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**rank_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_model_of_a_run_is_explained_in_place_of_training() -> None:
    zero_1 = ["--data-parallel-sharding-strategy", "optim"]
    done = run("--json", "--cpu-emulation", "--nproc", "2", str(SCRIPT), *STOCK_FLAGS, "--bf16", *zero_1)
    assert done.returncode == 0, done.stderr
    assert "lm loss" not in done.stdout + done.stderr
    assert "STARTED WITH" not in done.stdout + done.stderr
    (plan,) = json.loads(done.stdout)
    root, *layers = plan["units"]
    assert plan["module"] == "GPTModel"
    assert root["paths"] == [""]
    assert [layer["paths"] for layer in layers] == [["decoder.layers.0"], ["decoder.layers.1"]]
    (group,) = layers[0]["groups"]
    assert layers[0]["mesh"] == {"shard": 2}
    assert group["elements"] == sum(LAYER.values())
    assert group["dtypes"]["compute"] == "bfloat16"
    assert group["dtypes"]["main"] == "float32"
    whole = group["elements"] + group["padding"]
    assert group["bytes"]["compute_weights"] == 2 * whole
    assert group["bytes"]["main_weights"] == 2 * whole
    assert [(one["phase"], one["kind"], one["bytes"]) for one in layers[0]["collectives"]] == [
        ("forward", "all-gather", 2 * whole),
        ("backward", "reduce-scatter", 4 * whole),
    ]


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "0"}, "ended before Megatron's training loop built a model"),
        ({"MEGATRON_FSDP_V2_DISABLE": "1"}, "MEGATRON_FSDP_V2_DISABLE switches megatron_fsdp_v2 off"),
    ],
)
def test_what_can_not_be_explained_ends_with_the_reason(tmp_path: Path, variables: dict[str, str], said: str) -> None:
    done = run(script(tmp_path, "print('chatter')"), **variables)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stdout == ""
