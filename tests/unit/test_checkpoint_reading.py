"""Boxes of stored tensors are what plain DCP loads, whatever dtype and strides, and little more of a file is read."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron_fsdp_v2.checkpoint.chunk_metadata import Chunk
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.inspection import reading
from megatron_fsdp_v2.checkpoint.inspection.contents import Checkpoint, digest_of, problems_of
from megatron_fsdp_v2.checkpoint.inspection.memory import boxes
from megatron_fsdp_v2.checkpoint.inspection.reading import TensorReader
from megatron_fsdp_v2.checkpoint.inspector import compare, summarize

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    *(torch.int64, torch.int32, torch.uint8, torch.uint16, torch.bool, torch.complex64),
)


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.randn(5, 4, 3) * 4).abs().to(torch.float32).to(dtype) for dtype in DTYPES}
    whole = torch.randn(6, 4, 3)
    return tensors | {
        "float4": torch.arange(24, dtype=torch.uint8).reshape(4, 6).view(torch.float4_e2m1fn_x2),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4, 3),
        "transposed": whole.transpose(0, 2),
        "window": whole[1:5, :, 1:],
        "conjugate": torch.randn(4, 3, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3, 3)),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    dcp.save(state(), checkpoint_id=folder, no_dist=True)
    return folder


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def test_boxes_are_what_was_saved(saved: Path) -> None:
    checkpoint = Checkpoint(saved)
    reader = TensorReader(checkpoint)
    for key, tensor in state().items():
        for most in (2, 7, 1000):
            for box in boxes(tuple(tensor.shape), most):
                expected = tensor
                for dim, (start, size) in enumerate(zip(*box, strict=True)):
                    expected = expected.narrow(dim, start, size)
                read = reader.read(checkpoint.entries[key], box)
                assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
                assert bits(read).equal(bits(expected)), (key, box)


def test_no_more_is_read_than_needed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def noting(size: int) -> bytearray:
        sizes.append(size)
        return bytearray(size)

    monkeypatch.setattr(reading, "bytearray", noting, raising=False)
    checkpoint = Checkpoint(saved)
    reader = TensorReader(checkpoint)
    reader.read(checkpoint.entries["torch.float32"], Chunk((1, 0, 0), (2, 4, 3)))
    assert sizes == [2 * 12 * 4]
    # Two rows of four columns: from the first element to the last, and nothing before or after.
    reader.read(checkpoint.entries["torch.int64"], Chunk((0, 1, 0), (2, 1, 3)))
    assert sizes[1:] == [(12 + 3) * 8]


def test_memory_limits_each_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of one row is no exception, and the limit changes nothing about the result."""
    dcp.save({"w": torch.randn(1, 100_000)}, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = Checkpoint(tmp_path)
    expected = summarize(checkpoint, checkpoint.select("w"))["w"]
    sizes = []
    monkeypatch.setattr(reading, "bytearray", lambda size: sizes.append(size) or bytearray(size), raising=False)
    found = summarize(checkpoint, checkpoint.select("w"), memory=64 << 10)["w"]
    assert found.l2 == pytest.approx(expected.l2, rel=1e-12)
    assert (found.minimum, found.maximum, found.elements) == (expected.minimum, expected.maximum, 100_000)
    assert sum(sizes) == 400_000
    assert max(sizes) * 8 < 64 << 10 < max(sizes) * 12


class Inverted(StreamTransformExtension):
    """Stores every byte as its complement."""

    @classmethod
    def registry_name(cls) -> str:
        return "stream.inverted"

    @staticmethod
    def from_descriptor(version: str) -> Inverted:
        return Inverted()

    def get_descriptor(self) -> str:
        return "stream.inverted/1"

    def transform_to(self, output: Any) -> Any:
        import io

        class Writer(io.BytesIO):
            def close(self) -> None:
                output.write(bytes(255 - byte for byte in self.getvalue()))

        return Writer()

    def transform_from(self, input: Any) -> Any:
        import io

        return io.BytesIO(bytes(255 - byte for byte in input.read()))


def test_what_is_stored_in_another_way_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = torch.randn(4, 3)
    writer = dcp.FileSystemWriter(tmp_path, _extensions=[Inverted()])
    dcp.save({"w": expected}, storage_writer=writer, no_dist=True)
    checkpoint = Checkpoint(tmp_path)
    reader = TensorReader(checkpoint)
    monkeypatch.setattr(reader._reader.transforms.extension_registry, "extensions", {"stream.inverted": Inverted})
    assert reader.read(checkpoint.entries["w"], Chunk((1, 0), (2, 3))).equal(expected[1:3])


def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_truncated_and_missing_files(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    checkpoint = Checkpoint(folder)
    (name,) = checkpoint.entries["torch.float32"].files
    whole = (folder / name).read_bytes()
    ends = sorted({chunk.offset + chunk.length for entry in checkpoint.entries.values() for chunk in entry.chunks})
    for size in (0, 100, ends[0] - 1, ends[len(ends) // 2] - 700, ends[-1] - 1):
        (folder / name).write_bytes(whole[:size])
        assert any("ends at byte" in problem for problem in problems_of(folder, checkpoint.entries.values()))
        with pytest.raises(CheckpointError, match=r"can't be read; it is in .*distcp"):
            summarize(checkpoint, list(checkpoint.entries.values()))
    (folder / name).unlink()
    assert problems_of(folder, checkpoint.entries.values()) == [f"{name}: the file is missing"]
    with pytest.raises(CheckpointError, match="there is no file"):
        summarize(checkpoint, list(checkpoint.entries.values()))
    with pytest.raises(CheckpointError, match="there is no file"):
        compare(Checkpoint(saved), checkpoint)


def test_another_tensor_than_the_metadata_says(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    storage = metadata.storage_data
    big, small = MetadataIndex("torch.float32", (0, 0, 0)), MetadataIndex("parameter", (0, 0))
    storage[big], storage[small] = storage[small], storage[big]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    checkpoint = Checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"torch.float32 in .* can't be read"):
        summarize(checkpoint, checkpoint.select("torch.float32"))


def test_holes_are_noticed(saved: Path, tmp_path: Path) -> None:
    folder = copied(saved, tmp_path)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["torch.float32"].chunks[0].sizes = torch.Size((3, 4, 3))
    del metadata.storage_data[MetadataIndex("parameter", (0, 0))]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    checkpoint = Checkpoint(folder)
    problems = problems_of(folder, checkpoint.entries.values())
    assert problems == ["parameter: some of it is in no file", "torch.float32: its boxes have 36 of 60 elements"]
    for key in ("torch.float32", "parameter"):
        with pytest.raises(CheckpointError, match="in no file"):
            summarize(checkpoint, checkpoint.select(key))


def test_objects_are_hashed(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", 1), ("c", 2)):
        dcp.save({"x": value, "w": torch.ones(2)}, checkpoint_id=tmp_path / name, no_dist=True)
    a, b, c = (Checkpoint(tmp_path / name) for name in "abc")
    assert digest_of(a.path, a.entries["x"]) == digest_of(b.path, b.entries["x"])
    assert compare(a, b).is_equal
    found = compare(a, c)
    assert (found.objects, found.different, found.is_equal) == ({"x": False}, ["x"], False)
    (file,) = a.entries["x"].files
    (tmp_path / "a" / file).write_bytes(b"short")
    with pytest.raises(CheckpointError, match="bytes too early"):
        compare(a, c, pattern="x")
