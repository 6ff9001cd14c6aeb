"""Cases as named tests: one spawn runs all selected cases of a module for one number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.functional.core.cases_support import ZERO_3, Case, run_batch
from tests.harness.spawn import RankPool

# What is tried when not everything is asked for. Three ranks divide nothing evenly; one must work like plain torch.
USUAL_WORLDS = (1, 3)
OTHER_STRATEGIES_WORLD = 2


def cases_of(module: ModuleType, usual_worlds: tuple[int, ...] = USUAL_WORLDS) -> list[Any]:
    """Parameters (world, name) for every case of a module; all but the usual combinations belong to the full matrix.

    Usual are ZeRO-3 with `usual_worlds`, the other strategies with two ranks, and what cases without strategies say.
    """
    params = []
    for function, value in vars(module).items():
        declared = getattr(value, "case", None)
        if isinstance(declared, Case) and value.__module__ == module.__name__:
            for strategy in declared.strategies or ("",):
                name = f"{function}/{strategy}" if strategy else function
                usual = usual_worlds if strategy == ZERO_3 else (OTHER_STRATEGIES_WORLD,)
                if not strategy:
                    usual = declared.usual
                elif not set(usual) & set(declared.worlds):
                    usual = declared.worlds
                params += [_param(world, name, world in usual) for world in declared.worlds]
    return params


def _param(world: int, name: str, usual: bool) -> Any:
    return pytest.param(world, name, id=f"{name}-{world}", marks=[] if usual else [pytest.mark.full])


class Batches:
    """Outcomes of the cases of one module, run when the first one with that number of ranks is asked for."""

    def __init__(self, ranks: Callable[[int], RankPool], module: str, selected: dict[int, list[str]]) -> None:
        self._ranks = ranks
        self._module = module
        self._selected = selected
        self._failed: dict[int, dict[str, str] | BaseException] = {}

    def check(self, world: int, name: str) -> None:
        """Fails as the case failed on the ranks."""
        if world not in self._failed:
            self._failed[world] = self._run(world)
        failed = self._failed[world]
        if isinstance(failed, BaseException):
            raise failed
        if name in failed:
            pytest.fail(f"{name} on {world} ranks:\n{failed[name]}", pytrace=False)

    def _run(self, world: int) -> dict[str, str] | BaseException:
        try:
            by_rank = self._ranks(world).run(run_batch, self._module, self._selected[world], timeout=300)
        except RuntimeError as error:
            return error
        return {name: text for failed in by_rank for name, text in failed.items()}


def batches_of(module: ModuleType) -> Any:
    """The fixture `batches` of a test module whose cases live in `module`."""

    @pytest.fixture(scope="module")
    def batches(ranks: Callable[[int], RankPool], request: pytest.FixtureRequest) -> Batches:
        selected: dict[int, list[str]] = {}
        for item in request.session.items:
            params = getattr(getattr(item, "callspec", None), "params", {})
            if getattr(item, "module", None) is request.module and "name" in params:
                selected.setdefault(params["world"], []).append(params["name"])
        return Batches(ranks, module.__name__, selected)

    return batches
