"""How a plan is shown: rows that stand for many units, JSON, and text with and without rich."""

import io
import json
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

from benchmarks.models import TinyStack
from benchmarks.ranks import run_on_ranks
from megatron_fsdp_v2 import MixedPrecisionPolicy, explain, fully_shard
from megatron_fsdp_v2.explain import describe
from megatron_fsdp_v2.explaining.folding import fold
from megatron_fsdp_v2.explaining.plan import Collective, GroupPlan, Plan, RankBytes, UnitPlan, totals_of
from megatron_fsdp_v2.explaining.text import write


def unit(*paths, elements=100, phase="forward"):
    dtypes = dict.fromkeys(("compute", "main", "gradients", "communication"), "float32")
    placements = {use: {"shard": "sharded"} for use in ("compute", "main", "gradients")}
    held = RankBytes(compute_weights=208, main_gradients=208, gathered_weights=416)
    group = GroupPlan(True, 2, elements, 4, 4.0, 1, dtypes, placements, "cpu", held)
    return UnitPlan(
        paths,
        ("Block",),
        "cpu",
        {"shard": 2},
        True,
        True,
        (group,),
        (Collective(phase, "all-gather", "shard", 2, 416),),
    )


def labels(*units):
    return [row.label for row in fold(units)]


def test_units_that_differ_by_a_number_share_a_row():
    layers = [unit(f"layers.{index}") for index in range(61)]
    assert labels(unit(""), *layers, unit("head")) == ["(root)", "layers.0-60 (61 units)", "head"]


def test_units_that_differ_in_anything_else_do_not():
    dense = [unit(f"layers.{index}") for index in range(3)]
    sparse = [unit(f"layers.{index}", elements=200) for index in range(3, 10)]
    assert labels(*dense, *sparse) == ["layers.0-2 (3 units)", "layers.3-9 (7 units)"]
    assert labels(unit("layers.0"), unit("layers.1", phase="backward")) == ["layers.0", "layers.1"]
    assert labels(unit("layers.0"), replace(unit("layers.1"), mesh={"shard": 4})) == ["layers.0", "layers.1"]
    assert labels(unit("layers.0"), unit("other.1")) == ["layers.0", "other.1"]


def test_units_that_take_turns_share_rows_too():
    units = [unit(f"layers.{index}.{name}", elements=len(name)) for index in range(8) for name in ("mixer", "mlp")]
    assert labels(*units) == ["layers.0-7.mixer (8 units)", "layers.0-7.mlp (8 units)"]
    every_other = [unit(f"layers.{index}") for index in (0, 2, 4, 5)]
    assert labels(*every_other) == ["layers.0,2,4-5 (4 units)"]
    assert labels(*[unit(f"layers.{index}") for index in range(0, 40, 2)]) == ["layers.0,2,...,38 (20 units)"]


def test_paths_with_several_numbers_and_units_of_several_modules():
    assert labels(unit("stages.0.layers.0"), unit("stages.1.layers.1")) == [
        "stages.0.layers.0 ... stages.1.layers.1 (2 units)"
    ]
    assert labels(unit("norm", "head")) == ["norm, head"]
    assert labels(unit("a.0", "b.0"), unit("a.1", "b.1")) == ["a.0, b.0 ... a.1, b.1 (2 units)"]


def shown(plan):
    out = io.StringIO()
    write(plan, out)
    return out.getvalue()


def test_text_is_the_same_without_rich(monkeypatch):
    units = (unit("layers.0"), unit("layers.1", phase="backward"))
    plan = Plan("Model", units, totals_of(units))
    rich = shown(plan)
    monkeypatch.setitem(sys.modules, "rich", None)
    plain = shown(plan)
    words = [word for word in rich.split() if set(word) != {"─"}]
    assert words == plain.split()
    for text in ("1 all-gather 416 B", "832 B", "4.00 %", "S / S / S", "fp32 / fp32 / fp32 / fp32"):
        assert text in plain


def at_1024_ranks(tell):
    model = TinyStack(100)
    for index, part in enumerate(model.units):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) if index % 2 else None)
    fully_shard(model)
    text, data = io.StringIO(), io.StringIO()
    explain(model, file=text)
    explain(model, as_json=True, file=data)
    with pytest.raises(ValueError, match="Linear contains nothing sharded"):
        describe(nn.Linear(2, 2))
    return text.getvalue(), data.getvalue()


def test_a_hundred_units_on_a_thousand_ranks():
    text, data = run_on_ranks(at_1024_ranks, 1, 1024, "fake", lambda said: None)[0]
    assert len(text.splitlines()) < 35
    assert max(map(len, text.splitlines())) <= 180
    assert "units.0,2,...,98 (50 units)" in text
    plan = json.loads(data)
    assert [len(plan["units"]), plan["totals"]["units"], plan["module"]] == [101, 101, "TinyStack"]
    first, second = plan["units"][1:3]
    assert first["paths"] == ["units.0"]
    assert first["mesh"] == {"shard": 1024}
    group = first["groups"][0]
    # Six matrices of 8 rows and six vectors of 8: of 1024 ranks most get a row of padding or nothing.
    assert group["elements"] == 6 * (64 + 8)
    assert group["bytes"]["gathered_weights"] == 4 * (group["elements"] + group["padding"])
    assert group["bytes"]["compute_weights"] == group["bytes"]["gathered_weights"] / 1024
    assert second["groups"][0]["dtypes"] == {
        "compute": "bfloat16",
        "main": "float32",
        "gradients": "float32",
        "communication": "bfloat16",
    }
    assert [(one["phase"], one["kind"], one["ranks"]) for one in first["collectives"]] == [
        ("forward", "all-gather", 1024),
        ("backward", "all-gather", 1024),
        ("backward", "reduce-scatter", 1024),
    ]
