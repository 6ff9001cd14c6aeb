"""One unit is gathered ahead of compute, and never more."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_prefetch
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_prefetch)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_prefetch))
def test_prefetch(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
