"""The parameters and the state dict that others see."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_state_dict
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_state_dict)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_state_dict))
def test_state_dict(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
