"""The mixed-precision policy, beside plain torch and FSDP2."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_precision
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_precision)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_precision))
def test_precision(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
