"""What save_checkpoint and load_checkpoint keep of a run."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_checkpoint
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_checkpoint)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_checkpoint))
def test_checkpoint(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
