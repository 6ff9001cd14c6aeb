"""Parameters at rest gather, save and load as what they are."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_dtensor
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_dtensor)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_dtensor))
def test_dtensor(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
