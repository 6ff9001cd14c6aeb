"""Weights that come from and go to elsewhere, beside FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.functional.core.batches import Batches, batches_of, cases_of
from tests.functional.fsdp2 import cases_state
from tests.harness.spawn import RankPool

batches = batches_of(cases_state)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_state))
def test_state(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("ours", "ours"), ("ours", "theirs"), ("theirs", "ours")],
)
def test_checkpoint_at_another_number_of_ranks(
    ranks: Callable[[int], RankPool], tmp_path: Path, writer: str, reader: str
) -> None:
    """A checkpoint of two ranks is loaded by three, and by the other library: training goes on as if uninterrupted."""
    expected = ranks(2).run(cases_state.saved, str(tmp_path), writer)[0]
    loaded = ranks(3).run(cases_state.resumed, str(tmp_path), reader)
    for weights in loaded:
        assert list(weights) == list(expected)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
