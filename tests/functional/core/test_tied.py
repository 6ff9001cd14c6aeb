"""Parameters that several modules hold."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_tied
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_tied)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_tied))
def test_tied(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
