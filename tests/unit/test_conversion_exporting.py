"""Files of an export against the tensors it was made from, and checkpoints that can't be exported."""

from __future__ import annotations

import json
import os
import pickle
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_fsdp_v2_mcore.cli.main import app
from megatron_fsdp_v2_mcore.conversion import stored_settings
from megatron_fsdp_v2_mcore.conversion.names import links_of
from megatron_fsdp_v2_mcore.conversion.output import fresh_folder
from megatron_fsdp_v2_mcore.conversion.run_settings import settings_of
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.inspector import Checkpoint
from tests.unit.test_conversion_names import MODELS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MODEL = MODELS["qwen3"]


def save(folder: Path, weights: dict[str, torch.Tensor], settings: Any) -> Path:
    """A checkpoint as a run saves it, with one more entry that no export needs."""
    state = {"model": weights, "args": settings, "optimizer": {"state": {"x": torch.ones(3)}}}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def weights(fused_norms: bool = False) -> dict[str, torch.Tensor]:
    return {link.megatron: torch.randn(link.shape) for link in links_of(MODEL, fused_norms)}


def settings(**others: Any) -> Namespace:
    return Namespace(**settings_of(MODEL) | others)


def convert(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["ckpt", "convert", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    kept = weights()
    return save(tmp_path / "ckpt", kept, settings()), kept


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert sum(map(len, files.values())) == len(index["weight_map"])
    return {name: files[file][name] for name, file in index["weight_map"].items()}


def test_files_hold_the_values_of_the_checkpoint(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    source, kept = saved
    out = tmp_path / "hf"
    convert(source, out, "--to", "hf", "--max-shard-size", "20KB")
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 3
    for shard in shards:
        with safe_open(shard, "pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 20_000
        assert shard.stat().st_mode & 0o777 == (out / "config.json").stat().st_mode & 0o777
    tensors = loaded(out)
    config = json.loads((out / "config.json").read_text())
    assert tensors["lm_head.weight"].shape == (90, 32)
    assert torch.equal(tensors["lm_head.weight"], kept["output_layer.weight"][:90])
    assert torch.equal(tensors["model.layers.1.mlp.up_proj.weight"], kept["decoder.layers.1.mlp.linear_fc1.weight_v"])
    fused = kept["decoder.layers.0.self_attention.linear_qkv.weight"]
    # Two groups of two query heads, a key and a value head, of 6 rows each.
    assert torch.equal(tensors["model.layers.0.self_attn.k_proj.weight"], torch.cat([fused[12:18], fused[36:42]]))
    assert {name for name in tensors if "layers.0" not in name and "layers.1" not in name} == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert config["model_type"] == "qwen3"
    assert config["torch_dtype"] == "float32"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_dtype_is_that_of_the_run_or_of_the_user(tmp_path: Path) -> None:
    kept = weights(fused_norms=True)
    source = save(tmp_path / "ckpt", kept, settings(bf16=True))
    convert(source, tmp_path / "bf16", "--to", "hf")
    norm = kept["decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"]
    tensors = loaded(tmp_path / "bf16")
    assert torch.equal(tensors["model.layers.0.input_layernorm.weight"], norm.bfloat16())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    convert(source, tmp_path / "fp32", "--to", "hf", "--dtype", "fp32")
    assert torch.equal(loaded(tmp_path / "fp32")["model.layers.0.input_layernorm.weight"], norm)


def test_values_too_large_for_the_dtype(tmp_path: Path) -> None:
    kept = weights()
    kept["decoder.final_layernorm.weight"][3] = 1e5
    source = save(tmp_path / "ckpt", kept, settings())
    message = convert(source, tmp_path / "hf", "--to", "hf", "--dtype", "fp16", code=2)
    assert "model.decoder.final_layernorm.weight of" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]


def test_a_dry_run_lists_and_writes_nothing(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    message = convert(saved[0], tmp_path / "hf", "--to", "hf", "--dry-run")
    assert "model-00001-of-00001.safetensors  model.embed_tokens.weight" in message
    assert "a dry run" in message
    assert not (tmp_path / "hf").exists()


def test_only_into_a_new_or_empty_folder(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    out = tmp_path / "hf"
    out.mkdir()
    convert(saved[0], out, "--to", "hf")
    before = {entry: entry.stat().st_mtime_ns for entry in out.iterdir()}
    assert "is there already" in convert(saved[0], out, "--to", "hf", code=2)
    assert before == {entry: entry.stat().st_mtime_ns for entry in out.iterdir()}


def test_a_kill_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with fresh_folder(tmp_path / "out") as folder:
            (folder / "file").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.unfinished"]
    with pytest.raises(CheckpointError, match="one was stopped; then remove it"), fresh_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out.unfinished" / "file").read_text() == "half"


def test_tensors_that_do_not_fit_the_settings(tmp_path: Path) -> None:
    kept = weights()
    del kept["output_layer.weight"]
    kept["decoder.layers.2.input_layernorm.weight"] = torch.ones(32)
    kept["decoder.final_layernorm.weight"] = torch.ones(31)
    message = convert(save(tmp_path / "ckpt", kept, settings()), tmp_path / "hf", "--to", "hf", code=2)
    for line in (
        "missing in the checkpoint:\n    model.output_layer.weight",
        "in the checkpoint only:\n    model.decoder.layers.2.input_layernorm.weight",
        "model.decoder.final_layernorm.weight: (31,) in the checkpoint, (32,) by its settings",
    ):
        assert line in message


def test_more_layers_than_tensors(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", weights(), settings(num_layers=10**15))
    assert "fewer tensors than layers" in convert(path, tmp_path / "hf", "--to", "hf", code=2)


class Trap:
    """Unpickled with trust, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.file),))


def test_settings_are_read_without_running_them(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    hostile = settings(backend=signal.SIGTERM, trap=Trap(trap), dtype=torch.bfloat16, table=torch.ones(2))
    path = save(tmp_path / "ckpt", weights(), hostile)
    read = stored_settings.read_settings(Checkpoint(path))
    assert read == settings_of(MODEL)
    assert not trap.exists()
    convert(path, tmp_path / "hf", "--to", "hf")
    assert not trap.exists()


def test_what_is_no_settings(tmp_path: Path) -> None:
    path = save(tmp_path / "ckpt", weights(), signal.SIGTERM)
    assert "is no namespace of settings" in convert(path, tmp_path / "hf", "--to", "hf", code=2)


def test_no_settings_at_all(tmp_path: Path) -> None:
    dcp.save({"model": weights()}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert "has no settings of a run" in convert(tmp_path / "ckpt", tmp_path / "hf", "--to", "hf", code=2)
    with pytest.raises(CheckpointError, match="damaged"):
        stored_settings._unpickled(pickle.dumps(Namespace()), "these settings")


def test_arguments_that_mean_nothing(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    source, out = saved[0], tmp_path / "hf"
    assert "--from v2 --to v2 is no conversion" in convert(source, out, code=2)
    assert "--transformer-impl means nothing with --to hf" in convert(
        source, out, "--to", "hf", "--transformer-impl", "local", code=2
    )
    assert "is no amount of memory" in convert(source, out, "--to", "hf", "--max-shard-size", "many", code=2)
    assert "vocab size is 97" in convert(source, out, "--to", "hf", "--vocab-size", 97, code=2)
    assert "max_shard_size is 0" in convert(source, out, "--to", "hf", "--max-shard-size", 0, code=2)
