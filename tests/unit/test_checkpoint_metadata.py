"""Metadata and objects of checkpoints: real ones are read as DCP does, hostile and damaged ones get a named error."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.metadata import SafeFileSystemReader, read_metadata
from megatron_fsdp_v2.checkpoint.stored_objects import SafeLoadPlanner, read_object

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "weights": {"w": torch.arange(12.0).reshape(3, 4), "f8": torch.ones(5).to(torch.float8_e4m3fn)},
    "none": torch.empty(0, 3, dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "image": torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last).requires_grad_(),
    "step": 3,
    "text": {"lr": [0.1, 0.2], "name": "adam"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(STATE, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    return tmp_path / "ckpt"


class Call:
    """Pickles into a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def write(folder: Path, value: Any, protocol: int = 4) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(value, protocol=protocol))


def test_same_as_pickle(folder: Path) -> None:
    expected = pickle.loads((folder / ".metadata").read_bytes())
    assert read_metadata(folder) == expected
    assert read_metadata(str(folder / ".metadata")) == expected


def test_megatron_adds_plans_of_all_ranks(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    chunk = ChunkStorageMetadata(torch.Size((0,)), torch.Size((2,)))
    item = WriteItem(
        MetadataIndex("w", (0,)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, TensorProperties(), torch.Size((2,))),
    )
    metadata.all_local_plans = [SavePlan([item])]
    write(folder, metadata)
    assert vars(read_metadata(folder))["all_local_plans"] == metadata.all_local_plans


@pytest.fixture
def former_megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Classes under the names of Megatron 0.15, importable only while a file with them is written."""
    module = type(sys)("megatron.core.dist_checkpointing.strategies.torch")
    for name, base in (("MCoreMetadata", Metadata), ("MCoreSavePlan", SavePlan)):
        setattr(module, name, type(name, (base,), {"__module__": module.__name__}))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        yield module


def test_former_megatron_names(folder: Path, former_megatron: Any) -> None:
    metadata = former_megatron.MCoreMetadata(**vars(read_metadata(folder)))
    metadata.mcore_data = {"w": {"nd_reformulated_orig_global_shape": (2, 3)}}
    metadata.all_local_plans = [former_megatron.MCoreSavePlan([])]
    write(folder, metadata)
    loaded = read_metadata(folder)
    assert type(loaded) is Metadata
    assert vars(loaded)["mcore_data"] == metadata.mcore_data
    assert vars(loaded)["all_local_plans"] == [SavePlan([])]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", [os.system, os.unlink, eval, getattr, pickle.loads, torch.load])
def test_calls_are_refused(folder: Path, function: Any, protocol: int) -> None:
    target = folder / "target"
    target.touch()
    write(folder, {"entries": Call(function, f"rm {target}" if function is os.system else str(target))}, protocol)
    with pytest.raises(CheckpointError) as caught:
        read_metadata(folder)
    assert str(folder / ".metadata") in str(caught.value)
    assert f".{function.__name__}, which no checkpoint needs" in str(caught.value)
    assert target.exists()


def test_dotted_names_are_refused(folder: Path) -> None:
    inside = b"\x80\x04\x8c\x05torch\x8c\x13serialization._open\x93."
    (folder / ".metadata").write_bytes(inside.replace(b"\x13", bytes([len("serialization._open")])))
    with pytest.raises(CheckpointError, match=r"torch\.serialization\._open"):
        read_metadata(folder)


def test_every_prefix_of_a_file_is_an_error(folder: Path) -> None:
    file = folder / ".metadata"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"\.metadata") as caught:
            read_metadata(folder)
    assert "interrupted" in str(caught.value)


def test_missing(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "no", "no DCP|not a folder"), (tmp_path, "no DCP checkpoint")):
        with pytest.raises(CheckpointError, match=said):
            read_metadata(path)
    (tmp_path / ".metadata").mkdir()
    with pytest.raises(CheckpointError, match="can't be read"):
        read_metadata(tmp_path)
    (tmp_path / ".metadata").rmdir()
    (tmp_path / "__0.metadata").touch()
    with pytest.raises(CheckpointError, match="for each rank"):
        read_metadata(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    with pytest.raises(CheckpointError, match="iter_0000012"):
        read_metadata(tmp_path)


def entry(**changes: Any) -> TensorStorageMetadata:
    values: dict[str, Any] = {"shape": (4, 2), "offsets": (0, 0), "sizes": (4, 2), "dtype": torch.float32} | changes
    chunk = ChunkStorageMetadata(torch.Size(values["offsets"]), torch.Size(values["sizes"]))
    return TensorStorageMetadata(TensorProperties(values["dtype"]), torch.Size(values["shape"]), [chunk])


def stored(path: Any = "__0_0.distcp", offset: Any = 0, length: Any = 10) -> dict[Any, Any]:
    return {MetadataIndex("w", (0, 0)): _StorageInfo(path, offset, length)}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"not": "metadata"}, "holds a dict"),
        (Metadata({"w": entry()}), "no storage"),
        (Metadata({3: entry()}, storage_data={}), "3: a key that is no text"),
        (Metadata({"w": "text"}, storage_data={}), "'w': neither tensor nor bytes"),
        (Metadata({"w": entry(dtype="float32")}, storage_data={}), "no dtype"),
        (Metadata({"w": entry(shape=(4,))}, storage_data={}), "dimensions"),
        (Metadata({"w": entry(offsets=(1, 0))}, storage_data={}), "beyond the shape"),
        (Metadata({"w": entry(offsets=(-1, 0))}, storage_data={}), "dimensions"),
        (Metadata({"w": entry()}, storage_data=stored("../other/file")), "'w': the file '../other/file' is not inside"),
        (Metadata({"w": entry()}, storage_data=stored("/etc/passwd")), "not inside"),
        (Metadata({"w": entry()}, storage_data=stored(offset=-5)), "no place"),
        (Metadata({"w": entry()}, storage_data=stored(length="5")), "no place"),
        (Metadata({"w": entry()}, storage_data={"w": 1}), "belongs to no key"),
        (Metadata({"b": BytesStorageMetadata()}, storage_data={MetadataIndex("b"): "file"}), "kept as str"),
    ],
)
def test_contradictions(folder: Path, value: Any, said: str) -> None:
    write(folder, value)
    with pytest.raises(CheckpointError, match=said):
        read_metadata(folder)


def test_load_with_reader_and_planner(folder: Path) -> None:
    loaded = {
        "weights": {"w": torch.zeros(3, 4), "f8": torch.zeros(5, dtype=torch.float8_e4m3fn)},
        "none": torch.empty(0, 3, dtype=torch.bfloat16),
        "scalar": torch.tensor(0),
        "step": 0,
        "text": {"lr": [0.0], "name": ""},
    }
    dcp.load(loaded, storage_reader=SafeFileSystemReader(folder), planner=SafeLoadPlanner(), no_dist=True)
    assert loaded["weights"]["w"].equal(STATE["weights"]["w"])  # type: ignore[index]
    assert (loaded["step"], loaded["text"], loaded["scalar"]) == (3, STATE["text"], torch.tensor(7))


def test_load_refuses_foreign_metadata(folder: Path) -> None:
    write(folder, Call(os.system, "true"))
    with pytest.raises(CheckpointError, match="system"):
        SafeFileSystemReader(folder).read_metadata()


def test_load_never_runs_stored_objects(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    folder = tmp_path / "bad"
    dcp.save({"bad": Call(os.mkdir, str(mark))}, checkpoint_id=folder, no_dist=True)
    with pytest.raises(CheckpointException, match=r"bad can't be read .*posix\.mkdir"):
        dcp.load({"bad": 0}, storage_reader=SafeFileSystemReader(folder), planner=SafeLoadPlanner(), no_dist=True)
    assert not mark.exists()


@pytest.mark.parametrize("value", [3, "text", None, [1, {"a": (2.5, torch.float16)}], b"raw", {1: torch.Size((2,))}])
def test_plain_objects_are_read(value: Any) -> None:
    stream = io.BytesIO()
    torch.save(value, stream)
    assert read_object(stream.getvalue(), "key") == value


def test_objects_that_cannot_be_read() -> None:
    stream = io.BytesIO()
    torch.save(Call(os.system, "true"), stream)
    with pytest.raises(CheckpointError, match=r"key can't be read .*system"):
        read_object(stream.getvalue(), "key")
    for damaged in (b"", b"rubbish", stream.getvalue()[:-30]):
        with pytest.raises(CheckpointError, match="damaged"):
            read_object(damaged, "key")
