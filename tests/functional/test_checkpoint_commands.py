"""`mfsdp2 ckpt` as a user runs it: text, JSON, exit codes, errors, memory and ranks."""

from __future__ import annotations

import json
import math
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_fsdp_v2_mcore.cli.ckpt.session import parse_memory
from megatron_fsdp_v2_mcore.cli.main import app
from typer.testing import CliRunner, Result

# For the rank processes, which inherit it.
import megatron_fsdp_v2.checkpoint.inspector  # noqa: F401
from tests.harness.command import run_command
from tests.harness.spawn import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

LONG = "model." + "a_rather_long_name_" * 8 + ".weight"
STATE: dict[str, Any] = {
    LONG: torch.arange(12.0).reshape(3, 4),
    "model.odd": torch.tensor([math.nan, math.inf, -2.0]),
    "model.half": torch.tensor([[1.5, 2.0], [3.0, -4.0]], dtype=torch.bfloat16),
    "model.complex": torch.tensor([3 + 4j]),
    "count": torch.tensor(2**60 + 1),
    "empty": torch.empty(0, 3),
    "step": 3,
    "lr": {"min": 0.1},
}


def save(folder: Path, **changes: Any) -> Path:
    state = STATE | changes
    dcp.save({key: value for key, value in state.items() if value is not None}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("ckpt"))


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["ckpt", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments: object, code: int = 0) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json", code=code).stdout)


def test_list(folder: Path) -> None:
    lines = run("list", folder).stdout.splitlines()
    assert lines[0].split() == ["key", "kind", "dtype", "shape", "chunks", "files", "bytes"]
    # Keys are complete, however long.
    assert any(re.match(rf"{re.escape(LONG)} +tensor +float32 +\[3, 4\] +1 +1 +1,\d+$", line) for line in lines)
    assert lines[-1].startswith("6 tensors with 21 elements, 2 objects, ")
    assert [line.split()[0] for line in lines[1:-2]] == sorted([*STATE.keys() - {"lr"}, "lr.min"])


def test_list_as_json(folder: Path) -> None:
    report = run_json("list", folder, "--filter", "model.[!a]*")
    assert [entry["key"] for entry in report["entries"]] == ["model.complex", "model.half", "model.odd"]
    assert report["totals"] | {"bytes": 0} == {"tensors": 3, "objects": 0, "elements": 8, "bytes": 0, "files": 1}
    half = report["entries"][1]
    assert (half["dtype"], half["shape"], half["files"]) == ("bfloat16", [2, 2], ["__0_0.distcp"])
    chunk = half["chunks"][0]
    stored = (folder / chunk["file"]).read_bytes()[chunk["offset_in_file"] :][: chunk["bytes"]]
    (folder / "one.pt").write_bytes(stored)
    assert torch.load(folder / "one.pt").equal(STATE["model.half"])
    assert run_json("list", folder)["other_files"] == ["one.pt"]


def test_list_finds_missing_files(tmp_path: Path) -> None:
    (save(tmp_path) / "__0_0.distcp").unlink()
    result = run("list", tmp_path, code=2)
    assert "problems:\n  __0_0.distcp: the file is missing" in result.stderr
    assert run_json("list", tmp_path, code=2)["problems"] == ["__0_0.distcp: the file is missing"]


def test_print(folder: Path) -> None:
    text = run("print", folder, LONG, "--slice", "1:,:2").stdout
    norm = float(torch.linalg.vector_norm(STATE[LONG].double()))
    assert f"L2 {norm:.8g}, min 0, max 11, NaN 0, infinite 0" in text
    assert "[1:3,0:2]:\n    4  5\n    8  9\n" in text
    assert "[3, 4] at [0, 0]: " in text
    report = {entry["key"]: entry for entry in run_json("print", folder, "*")["entries"]}
    odd = report["model.odd"]
    assert (odd["nan"], odd["infinite"], odd["minimum"], odd["maximum"], odd["l2"]) == (1, 1, -2.0, "inf", "inf")
    assert odd["values"] == ["nan", "inf", -2.0]
    assert report["model.half"]["values"] == [[1.5, 2.0], [3.0, -4.0]]
    assert (report["model.complex"]["l2"], report["model.complex"]["values"]) == (5.0, ["(3+4j)"])
    assert report["count"]["values"] == 2**60 + 1
    assert report["empty"]["elements"] == 0
    assert (report["step"]["value"], report["lr.min"]["value"]) == ("3", "0.1")


def test_print_does_not_run_objects(tmp_path: Path) -> None:
    save(tmp_path, step=sys.exit)
    text = run("print", tmp_path, "step").stdout
    assert re.search(r"sha256 [0-9a-f]{64}\n  not shown: step can't be read .* it needs sys.exit", text)


@pytest.mark.parametrize(
    ("part", "said"),
    [("0,0,0", "3 dimensions"), ("x", "neither an index"), ("::2", "neither"), ("7", "outside"), (",1", "neither")],
)
def test_wrong_slices(folder: Path, part: str, said: str) -> None:
    assert said in run("print", folder, LONG, "--slice", part, code=2).stderr


def test_slices_are_those_of_torch(folder: Path) -> None:
    for part, expected in (("-1", STATE[LONG][-1:]), (":-1,-2:", STATE[LONG][:-1, -2:]), ("2:1", STATE[LONG][2:1])):
        (entry,) = run_json("print", folder, LONG, "--slice", part)["entries"]
        assert entry["values"] == expected.tolist(), part


def test_compare_equal(folder: Path, tmp_path: Path) -> None:
    assert run("compare", folder, save(tmp_path)).stdout == "6 tensors and 2 objects compared: equal\n"
    assert run_json("compare", folder, tmp_path)["equal"] is True


def test_compare_different(folder: Path, tmp_path: Path) -> None:
    changed = STATE[LONG].clone()
    changed[2, 1] += 0.5
    other = {"step": 4, LONG: changed, "model.half": STATE["model.half"].float(), "empty": None, "new": torch.ones(1)}
    save(tmp_path, **other, **{"model.complex": torch.zeros(2)})
    report = run_json("compare", folder, tmp_path, code=1)
    assert (report["only_a"], report["only_b"], report["different"]) == (["empty"], ["new"], [LONG, "step"])
    assert report["unlike"] == {
        "model.complex": {"a": "complex64 [1]", "b": "float32 [2]"},
        "model.half": {"a": "bfloat16 [2, 2]", "b": "float32 [2, 2]"},
    }
    seen = report["tensors"][LONG]
    assert (seen["differing"], seen["max_abs"], seen["l2"]) == (1, 0.5, 0.5)
    assert seen["max_rel"] == pytest.approx(0.5 / 9.5)
    assert report["tensors"]["model.half"]["differing"] == 0
    text = run("compare", folder, tmp_path, code=1).stdout
    for said in ("only in A:\n  empty", "only in B:\n  new", "objects with other bytes:\n  step", LONG):
        assert said in text
    assert run("compare", folder, tmp_path, "--filter", LONG, "--atol", "0.5").stdout.endswith("equal\n")
    assert run("compare", folder, tmp_path, "--filter", LONG, "--rtol", "0.053").stdout.endswith("equal\n")
    run("compare", folder, tmp_path, "--filter", LONG, "--rtol", "0.05", code=1)


def test_compare_without_a_prefix(folder: Path, tmp_path: Path) -> None:
    renamed = {key.removeprefix("model."): value for key, value in STATE.items()}
    dcp.save(renamed, checkpoint_id=tmp_path, no_dist=True)
    run("compare", folder, tmp_path, code=1)
    assert run("compare", folder, tmp_path, "--strip-prefix", "model.").stdout.endswith("equal\n")
    dcp.save({"model.x": torch.ones(1), "x": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
    result = run("compare", tmp_path, folder, "--strip-prefix", "model.", code=2)
    assert "two keys" in result.stderr


def test_rename_and_remove(tmp_path: Path) -> None:
    save(tmp_path)
    text = run("rename", tmp_path, "model.*", "net.*").stdout
    assert "model.odd -> net.odd\n" in text
    assert text.endswith("4 keys to be renamed; a dry run, so nothing was: add --apply\n")
    assert "model.odd" in pickle.loads((tmp_path / ".metadata").read_bytes()).state_dict_metadata
    assert run("rename", tmp_path, "model.*", "net.*", "--apply").stdout.endswith("4 keys renamed\n")
    text = run("remove", tmp_path, "net.*", "step", "--apply").stdout
    assert "stay in files that hold other keys; no space is freed for them\n5 keys removed\n" in text
    assert sorted(entry["key"] for entry in run_json("list", tmp_path)["entries"]) == ["count", "empty", "lr.min"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("list", "{}/nowhere"), "nowhere is not a folder"),
        (("list", "{}", "--filter", "x*"), "no key of .* matches 'x\\*'"),
        (("print", "{}", "x"), "no key of"),
        (("print", "{}", "step", "--memory", "1"), "at least 65536 bytes"),
        (("compare", "{}", "{}/nowhere"), "nowhere is not a folder"),
        (("compare", "{}", "{}", "--filter", "x"), "no key of"),
        (("compare", "{}", "{}", "--atol", "-1"), "atol=-1.0: a tolerance"),
        (("compare", "{}", "{}", "--rtol", "nan"), "rtol=nan"),
        (("rename", "{}", "x", "y"), "no key of"),
        (("remove", "{}", "x"), "no key of"),
    ],
)
def test_errors_have_one_line(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    result = run(*[argument.format(folder) for argument in arguments], code=2)
    assert result.stdout == ""
    assert re.fullmatch(rf"mfsdp2 ckpt: .*{said}.*\n", result.stderr), result.stderr


def test_hostile_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    assert "names os.system" in run("list", tmp_path, code=2).stderr


def test_memory_has_units() -> None:
    assert [parse_memory(text) for text in ("100000", "64K", "1.5 MiB", "2gb")] == [100000, 65536, 3 << 19, 2 << 30]
    assert "is no amount of memory" in run("print", "x", "y", "--memory", "much", code=2).stderr


_PEAKS = """
import re, sys
from pathlib import Path
from megatron_fsdp_v2_mcore.cli.main import app

# Imported here for the rank processes, which inherit it.
import megatron_fsdp_v2.checkpoint.inspector

for command in sys.argv[2:]:
    app(["ckpt", *command.format(sys.argv[1]).split()], standalone_mode=False)
    print("PEAK", re.search("VmHWM: *\t *([0-9]+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_checkpoint_larger_than_memory(tmp_path: Path) -> None:
    """The peak of reading 256 MB with 4 MiB is that of reading next to nothing, but for small change."""
    dcp.save({"big": torch.ones(64, 1 << 20), "small": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    commands = ["print {0} small", "print {0} big --memory 4MiB", "compare {0} {0} --memory 4MiB"]
    result = run_command([sys.executable, "-c", _PEAKS, str(tmp_path), *commands], timeout=100)
    assert result.returncode == 0, result.output
    least, printed, compared = [int(peak) << 10 for peak in re.findall(r"PEAK (\d+)", result.output)]
    assert printed - least < 48 << 20
    assert compared - least < 48 << 20


def compare_on_rank(rank: int, world_size: int, a: Path, b: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ckpt", "compare", str(a), str(b), "--memory", "64KiB"])
    return result.exit_code, result.output


def test_ranks_agree(folder: Path, tmp_path: Path, ranks: Callable[[int], RankPool]) -> None:
    """All ranks end with the same code, and rank 0 alone speaks."""
    for other, code, said in (
        (save(tmp_path / "same"), 0, "6 tensors and 2 objects compared: equal\n"),
        (save(tmp_path / "other", count=torch.tensor(1)), 1, "different\n"),
        (tmp_path / "none", 2, "none is not a folder\n"),
    ):
        first, *others = ranks(3).run(compare_on_rank, folder, other, timeout=60)
        assert first[0] == code
        assert first[1].endswith(said)
        assert others == [(code, "")] * 2


def test_torchrun(folder: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    rank = [sys.executable, "-m", "megatron_fsdp_v2_mcore.cli", "ckpt", "compare", str(folder), str(save(tmp_path))]
    result = run_command([*launch, *rank], timeout=100)
    assert result.returncode == 0, result.output
    assert result.output.count("compared: equal") == 1
