"""Fixtures shared by all tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.harness.spawn import RankPool, RankServer


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n).run(fn, *args)` runs `fn(rank, n, *args)` on n gloo ranks; see `tests/harness/spawn.py`."""
    server = RankServer()
    yield lambda world_size: RankPool(world_size, server)
    server.close()
