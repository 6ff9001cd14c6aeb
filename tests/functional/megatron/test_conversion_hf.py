"""Runs of stock Megatron and Hugging Face's form of their weights have the same losses, in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_fsdp_v2_mcore.cli.main import app
from megatron_fsdp_v2_mcore.conversion.architecture import LLAMA3_ROPE
from megatron_fsdp_v2_mcore.conversion.hugging_face_config import architecture_of_config, read_config
from megatron_fsdp_v2_mcore.conversion.run_settings import flags_of
from torch.nn import functional
from typer.testing import CliRunner

from tests.functional.megatron.cases import VOCABULARY, Case
from tests.functional.megatron.checkpoint_runs import ZERO_3, Ranks, Records, train
from tests.functional.megatron.driver import SyntheticText
from tests.functional.megatron.hugging_face_models import frequency, logits_of

_BATCH = 12
_SAVED = 10
_SCHEDULE = f"--global-batch-size {_BATCH} --eval-iters 0 --calculate-per-token-loss"
_KINDS = "--swiglu --normalization RMSNorm"
_GROUPS = "--group-query-attention --num-query-groups 2 --num-attention-heads 4"


@dataclass(frozen=True)
class Model:
    """Flags of a run that trains it, the rows it pads its vocabulary to, and how a run loads what was converted."""

    flags: str
    padded: int
    load: str
    tolerance: float = 1e-6


MODELS = {
    "qwen3": Model(
        "--group-query-attention --num-query-groups 1 --num-attention-heads 2 --kv-channels 24 --qk-layernorm "
        "--disable-bias-linear --untie-embeddings-and-output-weights --rotary-base 1000000 "
        "--make-vocab-size-divisible-by 40",
        120,
        "--load {} --finetune",
    ),
    "llama3": Model(
        f"{_GROUPS} --disable-bias-linear --use-rope-scaling --rope-scaling-factor 32 --norm-epsilon 1e-6",
        96,
        "--load {} --finetune",
    ),
    "qwen2": Model(
        "--add-qkv-bias --disable-bias-linear --untie-embeddings-and-output-weights", 96, "--pretrained-checkpoint {}"
    ),
    "biased": Model(f"{_GROUPS} --bf16", 96, "--load {} --no-load-optim --no-load-rng", tolerance=1e-4),
}


@dataclass(frozen=True)
class Converted:
    """Records of the runs that saved and of those that loaded what came back, by the model's name."""

    folder: Path
    saving: Records
    loading: Records


def convert(*arguments: Any) -> None:
    result = CliRunner().invoke(app, ["ckpt", "convert", *map(str, arguments)])
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def converted(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Every model trained and saved a step before the end; converted; converted back and loaded for some steps."""
    folder = tmp_path_factory.mktemp("hf")
    saves = [
        Case(name, _flags(f"{_KINDS} {model.flags} --train-iters {_SAVED + 1} --save {folder / name}"))
        for name, model in MODELS.items()
    ]
    saving = train(ranks, 2, saves)
    loads = []
    for name, model in MODELS.items():
        checkpoint = folder / name / f"iter_{_SAVED:07d}"
        convert(checkpoint, folder / f"{name}-padded", "--to", "hf", "--vocab-size", model.padded, "--dtype", "fp32")
        convert(checkpoint, folder / f"{name}-hf", "--to", "hf", "--max-shard-size", "60KB")
        back = folder / f"{name}-v2"
        options = ("--padded-vocab-size", model.padded, "--transformer-impl", "local")
        convert(folder / f"{name}-hf", back, "--from", "hf", *options)
        built = " ".join(flags_of(architecture_of_config(read_config(folder / f"{name}-hf"), model.padded, 1)))
        padding = f"--make-vocab-size-divisible-by {model.padded}"
        loads.append(Case(name, _flags(f"{built} {padding} {model.load.format(back)} --train-iters 3")))
    return Converted(folder, saving, train(ranks, 2, loads))


def _flags(text: str) -> tuple[str, ...]:
    return tuple(f"{ZERO_3} {_SCHEDULE} --save-interval {_SAVED} {text}".split())


def _loss(logits: torch.Tensor, samples: list[dict[str, torch.Tensor]]) -> float:
    labels, mask = (torch.stack([sample[key] for sample in samples]) for key in ("labels", "loss_mask"))
    losses = functional.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="none")
    return float((losses * mask.flatten()).sum() / mask.sum())


def _batch(step: int) -> list[dict[str, torch.Tensor]]:
    data = SyntheticText(_BATCH * (_SAVED + 1), salt=0)
    return [data[index] for index in range(step * _BATCH, (step + 1) * _BATCH)]


def _tokens(samples: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([sample["tokens"] for sample in samples])


@pytest.mark.parametrize("name", MODELS)
def test_the_next_loss_of_the_run(converted: Converted, name: str) -> None:
    """Megatron's softmax has the rows of the padding in it, so they are in this copy, too."""
    samples = _batch(_SAVED)
    loss = _loss(logits_of(converted.folder / f"{name}-padded", _tokens(samples)), samples)
    expected = converted.saving[name].losses
    assert expected[0] - expected[-1] > 0.05, "a model that learns nothing proves nothing"
    print(f"{name}: {loss} by formula, {expected[_SAVED]} by Megatron")
    assert loss == pytest.approx(expected[_SAVED], rel=MODELS[name].tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_the_first_loss_of_a_run_that_loads(converted: Converted, name: str) -> None:
    samples = _batch(0)
    logits = logits_of(converted.folder / f"{name}-hf", _tokens(samples))
    assert logits.shape[-1] == VOCABULARY
    loss = _loss(functional.pad(logits, (0, MODELS[name].padded - VOCABULARY)), samples)
    first = converted.loading[name].losses[0]
    print(f"{name}: {loss} by formula, {first} by Megatron, {converted.saving[name].losses[0]} untrained")
    assert loss == pytest.approx(first, rel=MODELS[name].tolerance)
    assert first != pytest.approx(converted.saving[name].losses[0], rel=10 * MODELS[name].tolerance)


def _stretched(rank: int, world: int, base: int, factor: float, size: int) -> torch.Tensor:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(
        size, 1.0, rotary_base=base, rope_scaling=True, rope_scaling_factor=factor, use_cpu_initialization=True
    )
    return embedding.inv_freq


def test_stretched_positions_have_the_frequencies_of_megatron(ranks: Ranks) -> None:
    """The runs here have too few positions to tell."""
    config = {"rope_theta": 500000.0, "rope_scaling": {"factor": 32.0, **LLAMA3_ROPE}}
    ours = torch.tensor([frequency(2 * n / 128, config) for n in range(64)])
    torch.testing.assert_close(ranks(1).run(_stretched, 500000, 32.0, 128, timeout=120)[0], ours, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_transformers_agrees(converted: Converted, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = converted.folder / f"{name}-padded"
    tokens = _tokens(_batch(_SAVED))
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(model(tokens).logits.float(), logits_of(folder, tokens), rtol=1e-4, atol=1e-4)
