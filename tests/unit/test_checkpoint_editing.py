"""Keys renamed and removed: DCP and plain pickle read the result, and what would break is refused."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.inspection import editing
from megatron_fsdp_v2.checkpoint.inspector import Checkpoint, plan_removal, plan_rename, problems_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "model": {"0.weight": torch.arange(6.0).reshape(2, 3), "0.bias": torch.zeros(2), "1.weight": torch.ones(3)},
    "optim": {"state": {0: {"step": torch.tensor(1)}, 1: {"step": torch.tensor(2)}}},
    "rng": [torch.zeros(4), torch.ones(4)],
    "step": 3,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Each entry has a file of its own."""
    writer = dcp.FileSystemWriter(tmp_path / "ckpt", single_file_per_rank=False)
    dcp.save(STATE, storage_writer=writer, no_dist=True)
    return tmp_path / "ckpt"


def nested(folder: Path) -> Any:
    """The whole checkpoint as DCP itself rebuilds it."""
    dcp_to_torch_save(folder, folder.parent / "whole.pt")
    return torch.load(folder.parent / "whole.pt", weights_only=False)


def keys(folder: Path) -> list[str]:
    metadata: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return sorted(metadata.state_dict_metadata)


def test_rename_one_key(folder: Path) -> None:
    change = plan_rename(Checkpoint(folder), "model.0.weight", "net.0.weight")
    assert change.keys == {"model.0.weight": "net.0.weight"}
    assert "model.0.weight" in keys(folder)
    change.apply()
    whole = nested(folder)
    assert whole["net"]["0.weight"].equal(STATE["model"]["0.weight"])  # type: ignore[call-overload]
    assert sorted(whole["model"]) == ["0.bias", "1.weight"]
    loaded = {"net": {"0.weight": torch.zeros(2, 3)}}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert loaded["net"]["0.weight"].equal(STATE["model"]["0.weight"])  # type: ignore[call-overload]


def test_rename_many_and_back(folder: Path) -> None:
    before = nested(folder)
    plan_rename(Checkpoint(folder), "model.*.*", "net.layer*.*.w").apply()
    assert [key for key in keys(folder) if key.startswith("net")] == [
        "net.layer0.bias.w",
        "net.layer0.weight.w",
        "net.layer1.weight.w",
    ]
    plan_rename(Checkpoint(folder), "net.layer*.*.w", "model.*.*").apply()
    after = nested(folder)
    assert after["model"].keys() == before["model"].keys() == STATE["model"].keys()  # type: ignore[attr-defined]
    assert after["model"]["0.weight"].equal(before["model"]["0.weight"])


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("optim.state.0.step", "optim.state.7.step", ("optim", "state", "7", "step")),
        ("optim.state.0.step", "state.0.step", ("state", "0", "step")),
        ("optim.state.0.step", "a.b.c", ("a", "b", "c")),
        ("model.0.weight", "net.x.y", ("net", "x.y")),
        ("model.0.weight", "weight", ("weight",)),
        ("optim.state.0.step", "optim.state.0.step.more", ("optim", "state", "0", "step.more")),
        ("rng.1", "last", ("last",)),
        ("step", "iteration", ("iteration",)),
    ],
)
def test_paths_of_nested_states(folder: Path, old: str, new: str, path: tuple[Any, ...]) -> None:
    plan_rename(Checkpoint(folder), old, new).apply()
    assert pickle.loads((folder / ".metadata").read_bytes()).planner_data[new] == path
    found = nested(folder)
    for step in path:
        found = found[step]
    assert found is not None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("nothing", "x", "no key of .* matches 'nothing'"),
        ("step", "step", "no key .* would change"),
        ("model.*", "net", "1 stars and 'net' has 0"),
        ("step", "model.0.bias", "'model.0.bias' and 'step' would both be 'model.0.bias'"),
        ("step*", "*", "empty key"),
        ("step", "model", "'model' would be a value and also the beginning of 'model.0"),
        ("rng.0", "rng.2", "'rng' is a list, and some items before rng.2 would be missing"),
        ("rng.1", "other.1", "'other' is a list"),
    ],
)
def test_refused_renames(folder: Path, old: str, new: str, said: str) -> None:
    before = (folder / ".metadata").read_bytes()
    with pytest.raises(ValueError, match=said):
        plan_rename(Checkpoint(folder), old, new)
    assert (folder / ".metadata").read_bytes() == before


def test_remove_deletes_files_of_its_own(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    (file,) = checkpoint.entries["model.0.weight"].files
    size = (folder / file).stat().st_size
    change = plan_removal(checkpoint, ["model.0.weight"])
    assert (change.files, change.freed, change.kept) == ((file,), size, 0)
    assert (folder / file).exists()
    change.apply()
    assert not (folder / file).exists()
    assert "model.0.weight" not in keys(folder)
    assert problems_of(folder, Checkpoint(folder).entries.values()) == []
    assert sorted(nested(folder)["model"]) == ["0.bias", "1.weight"]


def test_remove_keeps_shared_files(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    change = plan_removal(Checkpoint(tmp_path), ["optim.*", "step"])
    assert (change.files, change.freed) == ((), 0)
    assert change.kept > 0
    change.apply()
    assert not any(key.startswith(("optim", "step")) for key in keys(tmp_path))
    whole = {"model": {"0.weight": torch.zeros(2, 3)}}
    dcp.load(whole, checkpoint_id=tmp_path, no_dist=True)
    assert whole["model"]["0.weight"].equal(STATE["model"]["0.weight"])  # type: ignore[call-overload]


def test_refused_removals(folder: Path) -> None:
    for patterns, said in (
        (["step", "nothing"], "'nothing'"),
        (["*"], "nothing would be left"),
        (["rng.0"], "'rng' is a list"),
    ):
        with pytest.raises(ValueError, match=said):
            plan_removal(Checkpoint(folder), patterns)


def test_objects_in_parts_stay_together(tmp_path: Path) -> None:
    parts = {f"rng/shard_{part}_2": part for part in range(2)}
    dcp.save(parts | {"w": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    for refused in (
        lambda checkpoint: plan_rename(checkpoint, "rng/shard_0_2", "other/shard_0_2"),
        lambda checkpoint: plan_removal(checkpoint, ["rng/shard_1_2"]),
    ):
        with pytest.raises(ValueError, match=r"'rng' is one object in several parts; .*'rng/\*'"):
            refused(Checkpoint(tmp_path))
    with pytest.raises(ValueError, match="has to end with '/shard_0_2'"):
        plan_rename(Checkpoint(tmp_path), "rng/shard_*_2", "rng/part_*_2")
    plan_rename(Checkpoint(tmp_path), "rng/*", "state/*").apply()
    assert keys(tmp_path) == ["state/shard_0_2", "state/shard_1_2", "w"]
    plan_removal(Checkpoint(tmp_path), ["state/*"]).apply()
    assert keys(tmp_path) == ["w"]


def test_what_megatron_adds(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.mcore_data = {"step": {"nd_reformulated_orig_global_shape": (2,)}}
    metadata.all_local_plans = []
    metadata.planner_data = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    plan_rename(Checkpoint(folder), "step", "iteration").apply()
    changed = pickle.loads((folder / ".metadata").read_bytes())
    assert changed.mcore_data == {"iteration": {"nd_reformulated_orig_global_shape": (2,)}}
    assert not hasattr(changed, "all_local_plans")
    assert changed.planner_data is None


def test_planner_data_of_others(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = ["something"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="isn't understood"):
        plan_rename(Checkpoint(folder), "step", "iteration")


def test_the_file_is_replaced_in_one_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / ".metadata"
    before, names = file.read_bytes(), sorted(os.listdir(folder))
    change = plan_removal(Checkpoint(folder), ["step"])
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(editing.os, name, lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
            with pytest.raises(CheckpointError, match="No space left"):
                change.apply()
        assert (file.read_bytes(), sorted(os.listdir(folder))) == (before, names)
    file.chmod(0o640)
    change.apply()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [name for name in os.listdir(folder) if name.startswith(".metadata")] == [".metadata"]


def test_someone_else_was_faster(folder: Path) -> None:
    first = plan_removal(Checkpoint(folder), ["step"])
    plan_rename(Checkpoint(folder), "step", "iteration").apply()
    with pytest.raises(CheckpointError, match="changed by someone else"):
        first.apply()
    assert "iteration" in keys(folder)
