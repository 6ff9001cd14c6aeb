"""A folder in every state that a kill may leave it in: what is read from it, and what is written over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.storage import (
    begin_write,
    cancel_write,
    end_write,
    find_readable,
    is_complete,
    problem_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(path: Path, value: float) -> None:
    dcp.save({"w": torch.full((50,), value), "step": 3}, checkpoint_id=path, no_dist=True)


def value_in(path: Path) -> float:
    state = {"w": torch.zeros(50)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state["w"].unique().item()


def aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    write(tmp_path / "checkpoint", 1)
    return tmp_path / "checkpoint"


def test_a_folder_that_isnt_there(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "checkpoint"
    assert "is not a folder" in (problem_of(path) or "")
    begin_write(path)
    assert list(path.iterdir()) == []
    write(path, 1)
    end_write(path)
    assert find_readable(path) == path


def test_a_whole_one_is_kept_until_the_next_is_whole(whole: Path) -> None:
    begin_write(whole)
    assert not is_complete(whole)
    with pytest.warns(UserWarning, match="should have replaced"):
        assert value_in(find_readable(whole)) == 1
    with pytest.raises(CheckpointError, match="not whole after the save"):
        end_write(whole)
    assert value_in(aside(whole)) == 1
    write(whole, 2)
    assert find_readable(whole) == whole
    end_write(whole)
    assert value_in(whole) == 2
    assert not aside(whole).exists()


def test_a_write_can_be_cancelled_before_anything_is_written(whole: Path) -> None:
    begin_write(whole)
    cancel_write(whole)
    assert value_in(whole) == 1
    assert not aside(whole).exists()
    begin_write(whole)
    (whole / "__0_0.distcp").touch()
    cancel_write(whole)
    assert value_in(aside(whole)) == 1


def _without_metadata(path: Path) -> None:
    (path / ".metadata").rename(path / ".metadata.tmp")


def _cut_metadata(path: Path) -> None:
    file = path / ".metadata"
    file.write_bytes(file.read_bytes()[:-20])


def _cut_data(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def _no_data(path: Path) -> None:
    next(path.glob("*.distcp")).unlink()


DAMAGES = {
    "Was the save interrupted": _without_metadata,
    r"\.metadata is damaged": _cut_metadata,
    r"__0_0\.distcp has \d+ bytes of \d+": _cut_data,
    r"__0_0\.distcp is missing": _no_data,
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_half_one_is_named_and_written_over(whole: Path, said: str) -> None:
    DAMAGES[said](whole)
    with pytest.raises(CheckpointError, match=said):
        find_readable(whole)
    begin_write(whole)
    assert list(whole.iterdir()) == []
    assert not aside(whole).exists()


@pytest.mark.parametrize("said", DAMAGES)
def test_behind_a_half_one_the_one_before_stays(whole: Path, said: str) -> None:
    """Through any number of interrupted saves."""
    for value in (2, 3):
        begin_write(whole)
        write(whole, value)
        DAMAGES[said](whole)
        with pytest.warns(UserWarning, match="should have replaced"):
            assert value_in(find_readable(whole)) == 1
    begin_write(whole)
    write(whole, 4)
    end_write(whole)
    assert value_in(find_readable(whole)) == 4


def test_a_kill_between_the_last_two_steps(whole: Path) -> None:
    """Both are whole: the new one counts, also for the next save."""
    begin_write(whole)
    write(whole, 2)
    assert value_in(find_readable(whole)) == 2
    begin_write(whole)
    assert value_in(aside(whole)) == 2


def test_what_is_no_checkpoints_is_never_removed(whole: Path) -> None:
    _without_metadata(whole)
    (whole / "notes.txt").write_text("mine")
    before = sorted(whole.iterdir())
    with pytest.raises(CheckpointError, match=r"notes\.txt.*nothing is written"):
        begin_write(whole)
    assert sorted(whole.iterdir()) == before
    (whole / "notes.txt").unlink()
    (whole / "folder.distcp").mkdir()
    with pytest.raises(CheckpointError, match=r"folder\.distcp"):
        begin_write(whole)


def test_a_whole_one_moves_with_what_users_put_beside_it(whole: Path) -> None:
    (whole / "notes.txt").write_text("mine")
    begin_write(whole)
    assert (aside(whole) / "notes.txt").read_text() == "mine"


def test_where_nothing_can_be_written(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "checkpoint"):
        with pytest.raises(CheckpointError, match="can't be written"):
            begin_write(path)

    def refuse(source: object, target: object) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="can't be written: Permission denied"):
        begin_write(whole)
    assert value_in(whole) == 1


def test_reading_changes_nothing(whole: Path) -> None:
    begin_write(whole)
    (whole / "__0_0.distcp").write_bytes(b"half")
    before = {path: path.stat().st_mtime_ns for path in whole.parent.rglob("*")}
    with pytest.warns(UserWarning, match="should have replaced"):
        find_readable(whole)
    assert {path: path.stat().st_mtime_ns for path in whole.parent.rglob("*")} == before
