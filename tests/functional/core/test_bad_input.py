"""Bad input is refused with a clear error before any collective, and costs nothing."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_bad_input
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_bad_input)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_bad_input))
def test_bad_input(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
