"""What a rank holds between steps moves to the CPU and back, by itself where needed."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_moving
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_moving)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_moving))
def test_moving(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
