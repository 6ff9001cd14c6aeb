"""When gradients are reduced, and what becomes of those that wait."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_accumulation
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_accumulation)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_accumulation))
def test_accumulation(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
