"""Ways to call sharded modules, beside FSDP2."""

from __future__ import annotations

import pytest

from tests.functional.core.batches import Batches, batches_of, cases_of
from tests.functional.fsdp2 import cases_calls

batches = batches_of(cases_calls)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_calls))
def test_calls(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
