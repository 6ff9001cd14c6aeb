"""torch.compile of sharded modules."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_compile
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_compile)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_compile))
def test_compile(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
