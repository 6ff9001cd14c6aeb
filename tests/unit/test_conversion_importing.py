"""Checkpoints made of safetensors files, the way there and back, and folders that aren't trusted."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_fsdp_v2_mcore.conversion.architecture import Architecture
from megatron_fsdp_v2_mcore.conversion.hugging_face_config import config_of
from megatron_fsdp_v2_mcore.conversion.names import links_of
from safetensors.torch import save_file

from tests.unit.test_conversion_exporting import convert, loaded
from tests.unit.test_conversion_names import MODELS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

INDEX = "model.safetensors.index.json"


def model_folder(path: Path, model: Architecture, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A model of Hugging Face's, its layers in one file and the rest in another."""
    path.mkdir()
    names = {name: shape for link in links_of(model, True) for name, shape in link.hugging_face.items()}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in names.items()}
    places = {name: f"{'layers' if '.layers.' in name else 'rest'}.safetensors" for name in tensors}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in tensors.items() if places[name] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (path / "config.json").write_text(json.dumps(config_of(model, dtype)))
    return tensors


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_bit_by_bit(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    tensors = model_folder(tmp_path / "hf", model, torch.bfloat16 if model.bf16 else torch.float32)
    message = convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf")
    assert "padded vocabulary of 128" in message
    assert "the latest is" in convert(tmp_path / "v2", tmp_path / "back", "--to", "hf", code=2)
    convert(tmp_path / "v2" / "release", tmp_path / "back", "--to", "hf")
    back = loaded(tmp_path / "back")
    assert back.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(back[key], tensor), key
        assert back[key].dtype == tensor.dtype
    assert (tmp_path / "back" / "config.json").read_text() == json.dumps(
        config_of(model, tensor.dtype), indent=2
    ) + "\n"


def test_values_of_the_checkpoint(tmp_path: Path) -> None:
    tensors = model_folder(tmp_path / "hf", MODELS["qwen3"])
    options = ("--transformer-impl", "local", "--padded-vocab-size", 100, "--dtype", "bf16")
    convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf", *options)
    assert (tmp_path / "v2" / "latest_checkpointed_iteration.txt").read_text() == "release"
    key = "decoder.layers.1."
    state = {
        "model": {
            f"{key}input_layernorm.weight": torch.zeros(32, dtype=torch.bfloat16),
            f"{key}mlp.linear_fc1.weight_w": torch.zeros(72, 32, dtype=torch.bfloat16),
            f"{key}self_attention.linear_qkv.weight": torch.zeros(48, 32, dtype=torch.bfloat16),
            "output_layer.weight": torch.ones(100, 32, dtype=torch.bfloat16),
        }
    }
    dcp.load(state, checkpoint_id=tmp_path / "v2" / "release", no_dist=True)
    read = {name: value.float() for name, value in state["model"].items()}
    source = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    theirs = "model.layers.1."
    assert torch.equal(read[f"{key}input_layernorm.weight"], source[f"{theirs}input_layernorm.weight"])
    assert torch.equal(read[f"{key}mlp.linear_fc1.weight_w"], source[f"{theirs}mlp.gate_proj.weight"])
    # Of the second query group, the second head: after two heads, a key and a value of the first group, and one head.
    second_group = read[f"{key}self_attention.linear_qkv.weight"][24:]
    assert torch.equal(second_group[6:12], source[f"{theirs}self_attn.q_proj.weight"][18:24])
    assert torch.equal(second_group[18:24], source[f"{theirs}self_attn.v_proj.weight"][6:12])
    assert torch.equal(read["output_layer.weight"][:90], source["lm_head.weight"])
    assert not read["output_layer.weight"][90:].any()


def test_one_file_without_an_index_and_what_nothing_needs(tmp_path: Path) -> None:
    tensors = model_folder(tmp_path / "hf", MODELS["llama"])
    for file in tmp_path.glob("hf/*.safetensors*"):
        file.unlink()
    others = {"lm_head.weight": torch.ones(90, 32), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file(tensors | others, tmp_path / "hf" / "model.safetensors")
    message = convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf", "--dry-run")
    assert "left out, since nothing needs them: model.layers.0.self_attn.rotary_emb.inv_freq, lm_head.weight" in message
    assert "model.decoder.layers.1.mlp.linear_fc1.weight_v float32 [72, 32]" in " ".join(message.split())
    assert not (tmp_path / "v2").exists()


def _index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return apply


def _rewrite(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes())) and None


def _outside(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(32)}, folder.parent / "outside.safetensors")


def _other_shape(folder: Path) -> None:
    save_file(
        {"model.embed_tokens.weight": torch.ones(9, 32), "model.norm.weight": torch.ones(32)},
        folder / "rest.safetensors",
    )


def _other_dtype(folder: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(90, 32), "model.norm.weight": torch.ones(32, dtype=torch.int8)}
    save_file(tensors, folder / "rest.safetensors")


def _huge_header(folder: Path) -> None:
    (folder / "rest.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_index(lambda m: m.update({"model.norm.weight": "../outside.safetensors"})), "'../outside.safetensors', w"),
        (_index(lambda m: m.update({"model.norm.weight": "/etc/passwd"})), "'/etc/passwd', which is no file in"),
        (_index(lambda m: m.update({"model.norm.weight": ".."})), "'..', which is no file in"),
        (_index(lambda m: m.update({"model.norm.weight": ""})), "'', which is no file in"),
        (_index(lambda m: m.update({"model.norm.weight": 5})), "5 is missing"),
        (_index(lambda m: m.update({"model.norm.weight": "layers.safetensors"})), "norm.weight is in layers"),
        (_index(lambda m: m.update({"model.norm.weight": "none.safetensors"})), "none.safetensors is missing"),
        (_index(lambda m: m.pop("model.norm.weight")), "doesn't speak of model.norm.weight in rest.safetensors"),
        (_rewrite(INDEX, lambda content: content[:-9]), "index.json is no JSON"),
        (_rewrite(INDEX, lambda content: b"[1]"), "holds a list, not an object"),
        (_rewrite(INDEX, lambda content: b"[" * 100_000), "is no JSON"),
        (_rewrite(INDEX, lambda content: b"{}"), "has no weight_map"),
        (_rewrite("config.json", lambda content: b"\xff"), "config.json is no JSON"),
        (_rewrite("rest.safetensors", lambda content: content[:-5]), "rest.safetensors is damaged, cut off"),
        (_rewrite("rest.safetensors", lambda content: content[:5]), "rest.safetensors is damaged, cut off"),
        (_rewrite("rest.safetensors", lambda content: b""), "rest.safetensors is damaged, cut off"),
        (_huge_header, "rest.safetensors is damaged, cut off"),
        (_other_shape, "model.embed_tokens.weight: (9, 32) in the file, (90, 32) by the configuration"),
        (_other_dtype, "is I8; weights that are F32, F16, BF16 can be converted"),
        (lambda folder: (folder / INDEX).unlink(), "has neither model.safetensors.index.json nor model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json can't be read"),
    ],
)  # fmt: skip
def test_folders_that_are_not_trusted(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    model_folder(tmp_path / "hf", MODELS["llama"])
    _outside(tmp_path / "hf")
    damage(tmp_path / "hf")
    output = convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf", code=2)
    assert message in " ".join(output.split()), output
    assert not (tmp_path / "v2").exists()


def test_another_number_of_layers(tmp_path: Path) -> None:
    model_folder(tmp_path / "hf", MODELS["llama"])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    message = convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf", code=2)
    assert "in the checkpoint only:\n    model.layers.1.input_layernorm.weight" in message
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**15}))
    assert "fewer tensors than layers" in convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf", code=2)


def test_files_that_change_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_fsdp_v2_mcore.conversion import importing

    model_folder(tmp_path / "hf", MODELS["llama"])
    plan = importing.plan_import
    monkeypatch.setattr(
        importing, "plan_import", lambda *a, **k: (plan(*a, **k), (tmp_path / "hf" / "rest.safetensors").unlink())[0]
    )
    message = convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf", code=2)
    assert "rest.safetensors is missing" in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_parts_of_several_dtypes_need_a_choice(tmp_path: Path) -> None:
    tensors = model_folder(tmp_path / "hf", MODELS["qwen3"])
    name = "model.layers.0.self_attn.k_proj.weight"
    layers = {key: tensor for key, tensor in tensors.items() if ".layers." in key}
    save_file(layers | {name: layers[name].half()}, tmp_path / "hf" / "layers.safetensors")
    message = convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf", code=2)
    assert "are of several dtypes; choose one by --dtype" in message
    convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf", "--dtype", "fp32")


def test_arguments_that_mean_nothing(tmp_path: Path) -> None:
    model_folder(tmp_path / "hf", MODELS["llama"])
    message = convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf", "--max-shard-size", "1GB", code=2)
    assert "--max-shard-size means nothing with --from hf" in message
    message = convert(tmp_path / "hf", tmp_path / "v2", "--from", "hf", "--padded-vocab-size", 89, code=2)
    assert "padded vocab size is 89; give at least 90" in message
