"""Modules built on the meta device."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_meta
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_meta)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_meta))
def test_meta(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
