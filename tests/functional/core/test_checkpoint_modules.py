"""Modules that save and load more than their own memory, or under other names."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_checkpoint_modules
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_checkpoint_modules)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_checkpoint_modules))
def test_checkpoint_modules(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
