"""What is explained, beside what a step does."""

from __future__ import annotations

import pytest

from tests.functional.core import cases_explain
from tests.functional.core.batches import Batches, batches_of, cases_of

USUAL = (
    "every_strategy/optim_grads_params",
    "every_strategy/optim",
    "units_of_several_modules_and_of_none",
    "what_gradients_pass_is_learned_from_a_backward",
    "two_axes/optim_grads_params+optim",
    "resharding_to_neighbours",
)

batches = batches_of(cases_explain)
params = [
    param if param.values[1] in USUAL else pytest.param(*param.values, id=param.id, marks=pytest.mark.full)
    for param in cases_of(cases_explain)
]


@pytest.mark.parametrize(("world", "name"), params)
def test_explain(batches: Batches, world: int, name: str) -> None:
    batches.check(world, name)
