"""Clearing gradients keeps what it must; the steady state builds nothing."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_zero_grad
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_zero_grad)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_zero_grad))
def test_zero_grad(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
