"""Optimizers, schedulers, clipping and scaling, beside FSDP2."""

from __future__ import annotations

import pytest

from tests.functional.core.batches import Batches, batches_of, cases_of
from tests.functional.fsdp2 import cases_optimizers

batches = batches_of(cases_optimizers)


@pytest.mark.parametrize(("world", "name"), cases_of(cases_optimizers))
def test_optimizers(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
