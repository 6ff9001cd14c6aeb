"""CPU offload."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_offload
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_offload)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_offload))
def test_offload(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
