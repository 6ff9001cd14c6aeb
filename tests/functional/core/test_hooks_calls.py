"""What a module may be given, return and do, and who may call it."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_hooks_calls
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_hooks_calls)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_hooks_calls))
def test_calls(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
