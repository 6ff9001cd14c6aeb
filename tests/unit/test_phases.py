"""The phases of a unit: every allowed transition works, and every other one is refused by name."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn as nn

from megatron_fsdp_v2.precision import MixedPrecisionPolicy
from megatron_fsdp_v2.runtime.unit import Phase, Unit

ALLOWED = {
    (Phase.IDLE, Phase.FORWARD),
    (Phase.FORWARD, Phase.IDLE),
    (Phase.IDLE, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.IDLE),
}


def bare_unit(module: nn.Module) -> Unit:
    mesh = cast(Any, SimpleNamespace(device=torch.device("cpu")))
    return Unit([module], [module], [], mesh, MixedPrecisionPolicy(), None)


def test_a_unit_starts_idle() -> None:
    assert bare_unit(nn.Identity()).phase is Phase.IDLE


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Phase, Phase)))
def test_transitions(before: Phase, after: Phase) -> None:
    unit = bare_unit(nn.Identity())
    unit.phase = before
    if (before, after) in ALLOWED:
        unit.move_to(after)
        assert unit.phase is after
        return
    with pytest.raises(RuntimeError, match=f"unit 'Identity' can't enter {after.value} while it is in {before.value}"):
        unit.move_to(after)
    assert unit.phase is before


def test_a_unit_does_not_keep_its_module_alive() -> None:
    module = nn.Identity()
    unit = bare_unit(module)
    assert unit.modules == [module]
    del module
    assert unit.modules == []
