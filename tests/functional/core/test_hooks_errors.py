"""What cannot be right raises by name, and training goes on afterwards."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_hooks_errors
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_hooks_errors)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_hooks_errors))
def test_errors(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
