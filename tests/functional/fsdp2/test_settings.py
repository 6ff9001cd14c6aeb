"""The setters of a sharded module, beside those of FSDP2."""

from __future__ import annotations

import pytest

from tests.functional.core.batches import Batches, batches_of, cases_of
from tests.functional.fsdp2 import cases_settings

batches = batches_of(cases_settings)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_settings))
def test_settings(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
