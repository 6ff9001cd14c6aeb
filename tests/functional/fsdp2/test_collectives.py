"""The collectives of a step, counted beside those of FSDP2."""

from __future__ import annotations

import pytest

from tests.functional.core.batches import Batches, batches_of, cases_of
from tests.functional.fsdp2 import cases_collectives

batches = batches_of(cases_collectives)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_collectives))
def test_collectives(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
