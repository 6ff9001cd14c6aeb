"""Stock's flags for checkpoints, and what a run says of a checkpoint that it can't load."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_fsdp_v2.checkpoint.inspector import open_checkpoint, plan_removal, plan_rename
from tests.functional.megatron import inspections
from tests.functional.megatron.cases import Case, Record, relative_differences
from tests.functional.megatron.checkpoint_runs import (
    MODEL,
    STOP,
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

FLAGS = f"{ZERO_3} {MODEL}"
HALF = STOP // 2
WEIGHTS_ALONE = "--no-load-optim --no-load-rng"
_TRACKER = "latest_checkpointed_iteration.txt"


def _iteration(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flags")


@pytest.fixture(scope="module")
def saved(ranks: Ranks, folder: Path) -> Records:
    """An unbroken run, one that saved the iterations 5 and 10, and one that saved no optimizer state in 10."""
    cases = [
        whole("unbroken", 2, FLAGS),
        saving("saving", 2, folder / "full", FLAGS, HALF),
        saving("bare", 2, folder / "bare", f"{FLAGS} --no-save-optim --no-save-rng"),
    ]
    return train(ranks, 2, cases)


@pytest.fixture(scope="module")
def loaded(ranks: Ranks, saved: Records, folder: Path) -> Records:
    """Runs that load what was saved in all the ways there are."""
    full, bare = folder / "full", folder / "bare"
    cases = [
        loading("earlier step", 2, full, f"{FLAGS} --ckpt-step {HALF}"),
        loading("weights", 2, full, f"{FLAGS} {WEIGHTS_ALONE}"),
        loading("bare", 2, bare, f"{FLAGS} {WEIGHTS_ALONE}"),
        loading("finetuned", 2, full, f"{FLAGS} --finetune"),
        whole("pretrained", 2, f"{FLAGS} --pretrained-checkpoint {full}"),
        loading("nothing yet", 2, folder / "empty", FLAGS),
        loading("settings from the checkpoint", 2, full, f"{ZERO_3} --use-checkpoint-args"),
    ]
    return train(ranks, 2, cases)


def test_every_saved_iteration_is_kept(saved: Records, folder: Path) -> None:
    kept = {entry.name for entry in (folder / "full").iterdir()}
    assert kept == {_TRACKER, "iter_0000005", "iter_0000010"}
    assert (folder / "full" / _TRACKER).read_text() == "10"


def test_an_earlier_iteration_can_be_chosen(saved: Records, loaded: Records) -> None:
    assert len(loaded["earlier step"].losses) == 15
    assert loaded["earlier step"].losses == saved["unbroken"].losses[HALF:]


@pytest.mark.parametrize("case", ["weights", "bare"])
def test_weights_without_optimizer(saved: Records, loaded: Records, case: str) -> None:
    ours, unbroken = loaded[case].losses, saved["unbroken"].losses[STOP:]
    assert ours[0] == unbroken[0]
    assert max(relative_differences(ours, unbroken)) > 1e-4


@pytest.mark.parametrize("case", ["finetuned", "pretrained"])
def test_finetuning_starts_at_the_first_step(saved: Records, loaded: Records, case: str) -> None:
    unbroken = saved["unbroken"].losses
    assert len(loaded[case].losses) == len(unbroken)
    assert loaded[case].losses[0] < unbroken[0] - 0.05


def test_without_a_checkpoint_a_run_starts_anew(saved: Records, loaded: Records) -> None:
    assert loaded["nothing yet"].losses == saved["unbroken"].losses


def test_settings_from_the_checkpoint(saved: Records, loaded: Records) -> None:
    assert_continues(loaded["settings from the checkpoint"], saved["unbroken"], exact=True)


def _train_one(ranks: Ranks, case: Case) -> Record:
    return train(ranks, 2, [case])[case.name]


def _copy(folder: Path, name: str, iterations: Sequence[int] = (STOP,)) -> Path:
    """A run's folder of its own, to damage."""
    target = folder / name
    target.mkdir()
    shutil.copy(folder / "full" / _TRACKER, target)
    for iteration in iterations:
        shutil.copytree(_iteration(folder / "full", iteration), _iteration(target, iteration))
    return target


def test_exit_on_missing_checkpoint(ranks: Ranks, folder: Path) -> None:
    flags = f"{FLAGS} --exit-on-missing-checkpoint"
    ended = _train_one(ranks, Case("exit", loading("exit", 2, folder / "empty", flags).flags, stops=True))
    assert ended.losses == []


def test_a_truncated_file_is_named_with_what_is_whole(ranks: Ranks, saved: Records, folder: Path) -> None:
    place = _copy(folder, "truncated", (HALF, STOP))
    file = _iteration(place, STOP) / "__1_0.distcp"
    os.truncate(file, file.stat().st_size // 2)
    said = refused(ranks, loading("truncated", 2, place, FLAGS))
    assert f"{file} has {file.stat().st_size} bytes of" in said
    assert f"whole are the iterations {HALF}: --ckpt-step chooses one" in said


def test_a_missing_iteration_is_named_with_what_is_whole(ranks: Ranks, saved: Records, folder: Path) -> None:
    said = refused(ranks, loading("missing", 2, folder / "full", f"{FLAGS} --ckpt-step 7"))
    assert "whole are the iterations 5, 10: --ckpt-step chooses one" in said


def test_a_larger_model_is_refused_with_its_keys(ranks: Ranks, saved: Records, folder: Path) -> None:
    said = refused(ranks, loading("deeper", 2, folder / "full", f"{FLAGS} --num-layers 3"))
    assert "model.decoder.layers.2.self_attention.linear_qkv.weight" in said
    said = refused(ranks, loading("wider", 2, folder / "full", f"{FLAGS} --ffn-hidden-size 80"))
    assert "linear_fc1.weight_w: (72, 32) in the checkpoint, (80, 32) here" in said


def test_missing_optimizer_state_isrefused(ranks: Ranks, saved: Records, folder: Path) -> None:
    assert "--no-load-optim" in refused(ranks, loading("bare", 2, folder / "bare", FLAGS))


def test_a_renamed_key_is_listed_and_passed_over_only_on_request(ranks: Ranks, saved: Records, folder: Path) -> None:
    place = _copy(folder, "renamed")
    key = "model.decoder.final_layernorm.weight"
    plan_rename(open_checkpoint(_iteration(place, STOP)), key, f"{key}_old").apply()
    said = refused(ranks, loading("renamed", 2, place, FLAGS))
    assert f"missing in the checkpoint:\n    {key}\n" in said
    assert f"in the checkpoint only:\n    {key}_old\n" in said
    allowed = _train_one(ranks, loading("allowed", 2, place, f"{FLAGS} --no-strict-fsdp-dtensor-load"))
    unbroken = saved["unbroken"].losses[STOP:]
    assert 0 < relative_differences(allowed.losses, unbroken)[0] < 0.1


def test_a_file_of_weights_alone(ranks: Ranks, saved: Records, folder: Path) -> None:
    """Without settings, iteration or optimizer: a run in bf16 starts at its first step with these main weights."""
    place = _copy(folder, "weights")
    plan_removal(
        open_checkpoint(_iteration(place, STOP)),
        ["opt*", "args", "iteration", "checkpoint_version", "num_*", "rng_state*"],
    ).apply()
    tuned = _train_one(ranks, loading("weights", 2, place, f"{FLAGS} {WEIGHTS_ALONE} --bf16"))
    unbroken = saved["unbroken"].losses
    assert len(tuned.losses) == len(unbroken)
    assert tuned.losses[0] < unbroken[0] - 0.05


@pytest.mark.parametrize("text", ["", "1", "garbage"])
def test_a_damaged_tracker(ranks: Ranks, saved: Records, folder: Path, text: str) -> None:
    place = _copy(folder, f"tracker_{text}")
    (place / _TRACKER).write_text(text)
    if text == "1":
        assert "whole are the iterations 10" in refused(ranks, loading("tracker", 2, place, FLAGS))
    else:
        assert_continues(_train_one(ranks, loading("tracker", 2, place, FLAGS)), saved["unbroken"], exact=True)


def test_what_an_unfinished_save_moved_aside_is_loaded(ranks: Ranks, saved: Records, folder: Path) -> None:
    place = _copy(folder, "replaced")
    whole_one = _iteration(place, STOP)
    shutil.copytree(whole_one, whole_one.with_name(f"{whole_one.name}.replaced"))
    (whole_one / ".metadata").unlink()
    assert_continues(_train_one(ranks, loading("replaced", 2, place, FLAGS)), saved["unbroken"], exact=True)


def test_a_place_that_cannot_be_written_is_named(ranks: Ranks, folder: Path) -> None:
    file = folder / "file"
    file.touch()
    said = refused(ranks, saving("no folder", 2, file / "run", FLAGS))
    assert f"{file / 'run'}" in said
    assert "can't be written" in said


def test_ranks_with_different_keys_are_told_apart(ranks: Ranks, saved: Records, folder: Path) -> None:
    """The save ends on all ranks with the same error, and what the folder held before is there again."""
    place = _copy(folder, "odd", (HALF, STOP))
    flags = f"{FLAGS} --ckpt-step {HALF} --save {place} --save-interval {HALF}"
    said = refused(ranks, loading("odd", 2, place, flags, inspections.state_of_one_rank))
    assert "1 keys differ" in said
    assert ".odd: missing on rank 0; float32" in said
    assert {entry.name for entry in place.iterdir()} == {_TRACKER, "iter_0000005", "iter_0000010"}
    assert_continues(_train_one(ranks, loading("whole", 2, place, FLAGS)), saved["unbroken"], exact=True)
