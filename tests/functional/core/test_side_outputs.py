"""What leaves a forward beside its result, and hooks of users on parameters."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_side_outputs
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_side_outputs)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_side_outputs))
def test_side_outputs(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
