"""A stock run with its DistributedOptimizer saves in its own format and stops; v2 goes on from there as it would have.

The reference is the stock run that never stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_fsdp_v2 import full_tensor
from tests.functional.megatron import gated_delta_nets
from tests.functional.megatron.cases import relative_differences
from tests.functional.megatron.checkpoint_runs import (
    MODEL,
    STOP,
    V2,
    ZERO_3,
    Ranks,
    Records,
    assert_continues,
    loading,
    refused,
    saving,
    train,
    whole,
)

STOCK = "--use-distributed-optimizer --ckpt-format torch_dist"
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-shared-expert-intermediate-size 24"
VARIANTS = {
    "dense": "",
    "bf16": "--bf16",
    "experts": EXPERTS,
    "mtp": "--mtp-num-layers 1",
    "untied": "--untie-embeddings-and-output-weights --disable-bias-linear",
    "gated delta net": gated_delta_nets.FLAGS,
}
_MASTER = "embedding.word_embeddings.weight"


def embedding(model: Any, optimizer: Any) -> torch.Tensor:
    """The whole main weight of the embedding."""
    weights = {name: parameter for name, parameter in model.named_parameters() if name.endswith(_MASTER)}
    (weight,) = weights.values()
    return full_tensor(weight).detach().clone()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch_dist")


@pytest.fixture(scope="module")
def runs(ranks: Ranks, folder: Path) -> dict[str, Records]:
    """Per variant stock's unbroken run on two ranks, and v2's runs from its checkpoint on two and on three."""
    records: dict[str, Records] = {}
    for variant, more in VARIANTS.items():
        model, place, run = f"{MODEL} {more}", folder / variant.replace(" ", "_"), gated_delta_nets.run_of(variant)
        cases = [
            whole("stock", 2, f"{STOCK} {model}"),
            saving("saving", 2, place, f"{STOCK} {RESHARDABLE} {model}"),
            loading("on two", 2, place, f"{ZERO_3} {model}", embedding),
        ]
        records[variant] = train(ranks, 2, cases, run)
        records[variant] |= train(ranks, 3, [loading("on three", 3, place, f"{ZERO_3} {model}")], run)
    return records


@pytest.mark.parametrize("world", ["on two", "on three"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_v2_goes_on_where_stock_stopped(runs: dict[str, Records], variant: str, world: str) -> None:
    tolerance = 5e-3 if variant == "bf16" else 1e-5
    assert_continues(runs[variant][world], runs[variant]["stock"], exact=False, tolerance=tolerance)


def test_main_weights_are_the_optimizers_not_the_rounded_ones(runs: dict[str, Records], folder: Path) -> None:
    loaded = runs["bf16"]["on two"].inspected
    saved = {f"optimizer.state.param.{_MASTER}": torch.empty_like(loaded)}
    dcp.load(saved, checkpoint_id=folder / "bf16" / f"iter_{STOP:07d}", no_dist=True)
    assert torch.equal(loaded, saved[f"optimizer.state.param.{_MASTER}"])
    assert not torch.equal(loaded, loaded.bfloat16().float())


@pytest.fixture(scope="module")
def without_optimizer(ranks: Ranks, folder: Path) -> Records:
    """A checkpoint without optimizer state, and one whose optimizer state is in the shape of stock's buffers."""
    bare, buffers = folder / "bare", folder / "buffers"
    weights = "--no-load-optim --no-load-rng"
    cases = [
        whole("stock", 2, f"{STOCK} {MODEL}"),
        saving("bare", 2, bare, f"{STOCK} {MODEL} --no-save-optim --no-save-rng"),
        saving("buffers", 2, buffers, f"{STOCK} {MODEL}"),
        loading("from bare", 2, bare, f"{V2} optim {MODEL} {weights}"),
        loading("from buffers", 2, buffers, f"{ZERO_3} {MODEL} {weights}"),
        loading("finetuned", 2, bare, f"{ZERO_3} {MODEL} --finetune"),
    ]
    return train(ranks, 2, cases)


@pytest.mark.parametrize("case", ["from bare", "from buffers"])
def test_weights_alone(without_optimizer: Records, case: str) -> None:
    """The first loss depends on the weights alone; what follows is that of a new optimizer."""
    ours, stock = without_optimizer[case].losses, without_optimizer["stock"].losses[STOP:]
    assert relative_differences(ours[:1], stock[:1])[0] <= 1e-6
    assert max(relative_differences(ours, stock)) > 1e-4


def test_finetuning_begins_at_the_first_step(without_optimizer: Records) -> None:
    stock, tuned = without_optimizer["stock"].losses, without_optimizer["finetuned"].losses
    assert len(tuned) == len(stock)
    assert tuned[0] < stock[0] - 0.05


def test_state_in_buffer_shape_is_refused_with_the_remedy(
    ranks: Ranks, without_optimizer: Records, folder: Path
) -> None:
    said = refused(ranks, loading("refused", 2, folder / "buffers", f"{ZERO_3} {MODEL}"))
    assert RESHARDABLE in said
    assert "--no-load-optim" in said


def test_missing_optimizer_state_isrefused(ranks: Ranks, without_optimizer: Records, folder: Path) -> None:
    assert "has no optimizer state: give --no-load-optim" in refused(
        ranks, loading("refused", 2, folder / "bare", f"{ZERO_3} {MODEL}")
    )


def test_another_model_is_refused_with_every_key(ranks: Ranks, runs: dict[str, Records], folder: Path) -> None:
    said = refused(ranks, loading("refused", 2, folder / "dense", f"{ZERO_3} {MODEL} --num-layers 3"))
    assert "decoder.layers.self_attention.linear_qkv.weight" in said
    assert "(2, 96, 32) in the checkpoint, (3, 96, 32) here" in said
