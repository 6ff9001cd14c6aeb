"""Ranks that disagree are told so."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_agreement
from tests.functional.core.batches import Batches, batches_of, cases_of

batches = batches_of(cases_agreement)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_agreement))
def test_agreement(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
