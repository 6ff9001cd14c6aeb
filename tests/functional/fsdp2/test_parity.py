"""Training under our `fully_shard`, beside FSDP2 and plain torch."""

from __future__ import annotations

import pytest

from tests.functional.core.batches import Batches, batches_of, cases_of
from tests.functional.fsdp2 import cases_parity

batches = batches_of(cases_parity)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_parity))
def test_parity(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
