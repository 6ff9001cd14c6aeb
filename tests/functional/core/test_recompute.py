"""Activation recomputation: around units, inside them, and around several."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_recompute
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_recompute)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_recompute, usual_worlds=(3,)))
def test_recomputation(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
