"""A stale copy of the weights is never computed with."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_freshness
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_freshness)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_freshness))
def test_freshness(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
