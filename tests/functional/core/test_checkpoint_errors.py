"""Saves and loads that can't succeed."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_checkpoint_errors
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_checkpoint_errors)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_checkpoint_errors))
def test_checkpoint_errors(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
