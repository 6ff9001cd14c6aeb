"""Frozen parameters, and several dtypes in one unit."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_frozen
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_frozen)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_frozen))
def test_frozen(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
