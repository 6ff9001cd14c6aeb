"""Strategies, meshes, accumulation and scaling, beside one process."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_strategies
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_strategies)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_strategies))
def test_strategies(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
