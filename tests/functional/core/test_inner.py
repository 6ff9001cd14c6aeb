"""Parameters that another parallelism has divided already."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_inner
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_inner)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_inner))
def test_inner(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
