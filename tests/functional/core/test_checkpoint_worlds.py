"""Saved by some ranks, loaded by others: every element is where it was, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_fsdp_v2 import load_checkpoint
from tests.functional.core import checkpoint_runs as runs
from tests.functional.core.cases_dtensor import TWO_AXIS_LAYOUTS, Bag
from tests.functional.core.cases_support import STRATEGIES, ZERO_3
from tests.harness.spawn import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Ranks = Callable[[int], RankPool]
WORLDS = (1, 2, 3, 4)
LAYOUTS = {world: [ZERO_3] if world != 3 else list(STRATEGIES) for world in WORLDS}
LAYOUTS[4] = [ZERO_3, f"{ZERO_3}/no_shard", f"{ZERO_3}/optim", "optim/optim"]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for world in WORLDS:
        ranks(world).run(runs.save_integers, str(folder), LAYOUTS[world])
    return folder


ALL = [(world, layout) for world in WORLDS for layout in LAYOUTS[world]]


@pytest.mark.parametrize(("world", "layout"), ALL)
def test_files_tile_every_tensor(saved: Path, world: int, layout: str) -> None:
    runs.check_files(runs.place(str(saved), world, layout))


@pytest.mark.parametrize(
    ("world", "layout"),
    [*[(world, ZERO_3) for world in WORLDS], (2, "no_shard"), (3, "optim"), (4, f"{ZERO_3}/optim")],
)
def test_all_that_was_saved_loads(ranks: Ranks, saved: Path, world: int, layout: str) -> None:
    ranks(world).run(runs.check_integers, str(saved), ALL, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", [*STRATEGIES, *TWO_AXIS_LAYOUTS])
def test_all_that_was_saved_loads_into_every_layout(ranks: Ranks, saved: Path, layout: str) -> None:
    ranks(4).run(runs.check_integers, str(saved), ALL, layout)


def test_one_process_without_a_group_loads_all(saved: Path) -> None:
    for world, layout in ALL:
        bag = Bag(shapes=runs.SHAPES, start=5000)
        optimizer = torch.optim.AdamW(bag.parameters())
        load_checkpoint(bag, optimizer, runs.place(str(saved), world, layout))
        for name, index, whole in runs.integers(bag):
            parameter = list(bag.parameters())[index]
            runs.same(parameter, whole, name)
            for key, start in runs.MOMENTS.items():
                runs.same(optimizer.state[parameter][key], whole + start, key)


RUNS = [
    *[(model, kind) for model in ("three", "one") for kind in runs.OPTIMIZERS],
    ("net", "adam"),
    ("net", "skipping"),
]


@pytest.mark.parametrize(("writers", "readers"), [(4, 4), (2, 4), (4, 1), (1, 3)])
def test_training_goes_on(ranks: Ranks, tmp_path: Path, writers: int, readers: int) -> None:
    """Loaded before any step, by more or fewer ranks, most of which may hold nothing; against plain torch."""
    ranks(writers).run(runs.save_run, str(tmp_path), RUNS)
    for results in ranks(readers).run(runs.resume_run, str(tmp_path), writers, RUNS):
        for (model, kind), weights in zip(RUNS, results, strict=True):
            for ours, expected in zip(weights, runs.reference(model, kind), strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5, msg=lambda m: f"{model} {kind}: {m}")  # noqa: B023
