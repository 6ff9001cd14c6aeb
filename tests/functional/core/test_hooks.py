"""Gradients are never dropped, whatever order forwards and backwards come in."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_hooks
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_hooks)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_hooks, usual_worlds=(1, 3, 4)))
def test_gradients(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
