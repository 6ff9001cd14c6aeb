"""Norms and clipping, beside torch in one process."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_clip
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_clip)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_clip))
def test_clip(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
