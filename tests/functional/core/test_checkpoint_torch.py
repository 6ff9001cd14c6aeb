"""The state dicts of torch and plain DCP."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_checkpoint_torch
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_checkpoint_torch)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_checkpoint_torch))
def test_checkpoint_torch(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
