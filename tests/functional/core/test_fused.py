"""Parameters at rest gather, save and load as what they are."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_fused
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_fused)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_fused))
def test_fused(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
