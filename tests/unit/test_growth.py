"""How the growth of costs is measured and shown. Nothing here asserts a time."""

import io
import json

import pytest
import torch
import torch.nn as nn
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh
from typer.testing import CliRunner

import benchmarks.__main__ as command
from benchmarks import growth, growth_tables
from benchmarks.models import TinyStack
from benchmarks.ranks import run_on_ranks
from benchmarks.results import PLAIN, GrowthFigures, GrowthResult, StartFigures
from benchmarks.shapes import LAYERS, DeepSeekV3
from benchmarks.variants import HOST_VARIANTS
from megatron_fsdp_v2 import FSDPModule, fully_shard


def test_the_shapes_are_those_of_deepseek_v3():
    with torch.device("meta"):
        model = DeepSeekV3()
    # Published as 671 billion, without multi-token prediction.
    assert sum(param.numel() for param in model.parameters()) == 671_026_404_352
    assert len(model.units) == LAYERS + 3


def variant_at(ranks):
    model = TinyStack(2)
    wrapped = HOST_VARIANTS[1].wrap(model, list(model.units), DeviceMesh("cpu", torch.arange(ranks)))
    growth.timed_pass(wrapped, 2)
    growth.timed_pass(wrapped, 2)
    return wrapped


def small_measurements(tell):
    growth.WORLD_SIZE = 64
    host = growth.measure_host(tell, 2, ((2, 8), (2, 64)))
    model = variant_at(64)
    forward, backward = growth.collectives_of_pass(model)
    sent = [[str(call[0]).split(".")[1] for call in recorder.calls] for recorder in (forward, backward)]
    start = growth.measure_start(tell, 2, (2, 4), (2,))
    # What was replaced to measure wrapping is back: a meta module gets memory again.
    real = fully_shard(nn.Linear(4, 4, device="meta"))
    return host, start, sent, isinstance(real, FSDPModule) and real.weight.device.type


def test_every_point_and_variant_is_measured():
    host, start, sent, device = run_on_ranks(small_measurements, 1, 64, "fake", lambda text: None)[0]
    assert device == "cpu"
    assert sent == [["_allgather_base_"] * 2, ["_allgather_base_"] * 2 + ["_reduce_scatter_base_"] * 2]
    names = [PLAIN, "FSDP2", "v2 ZeRO-3"]
    assert [(row.name, row.ranks) for row in host] == [(name, ranks) for ranks in (8, 64) for name in names]
    assert all(len(row.forward) == len(row.backward) == 2 for row in host)
    assert all(len(row.forward_sending) == len(row.backward_sending) == 2 for row in host)
    assert [(row.name, row.layers, len(row.seconds)) for row in start] == [
        ("FSDP2", 2, 1),
        ("v2 ZeRO-3", 2, 2),
        ("v2 ZeRO-3", 4, 2),
    ]
    # Embedding, output layer, final norm, and 11 parameters in each dense layer; 524 in a layer of experts.
    assert [row.parameters for row in start] == [25, 25, 3 + 3 * 11 + 524]


def a_result():
    def row(name, ranks, forward, sending):
        return GrowthFigures(name, [forward], [forward], 8, ranks, [sending], [sending])

    host = [row(PLAIN, 8, 10.0, 0.0), row("FSDP2", 8, 120.0, 10.0), row("v2 ZeRO-3", 8, 60.0, 10.0)]
    host += [row(PLAIN, 64, 10.0, 0.0), row("FSDP2", 64, 310.0, 100.0), row("v2 ZeRO-3", 64, 160.0, 100.0)]
    return GrowthResult(host, [StartFigures("v2 ZeRO-3", 2, 1000, 2 * 10**9, [0.5, 0.25])])


def test_tables_compare_with_fsdp2_and_with_the_first_point():
    out = Console(width=200, record=True, file=io.StringIO())
    out.print(growth_tables.host_table(a_result().host))
    out.print(growth_tables.start_table(a_result().start))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.export_text().splitlines()]
    mine = [line[3:8] for line in lines if line[2:3] == ["v2 ZeRO-3"]]
    assert mine == [["60", "10", "40", "0.40", "1.00"], ["160", "100", "50", "0.25", "1.25"]]
    assert ["v2 ZeRO-3", "2", "1,000", "2.0", "0.25", "250"] in lines


def test_command_measures_growth_alone(monkeypatch, tmp_path):
    rounds = []
    monkeypatch.setattr(growth, "run", lambda count, tell: rounds.append(count) or a_result())
    target = tmp_path / "figures.json"
    outcome = CliRunner().invoke(command.app, ["growth", "--quick", "--json", str(target)])
    assert outcome.exit_code == 0, outcome.output
    assert rounds == [3]
    written = json.loads(target.read_text())
    assert list(written) == ["growth"]
    assert written["growth"]["host"][3]["ranks"] == 64
    assert written["growth"]["start"][0]["seconds"] == [0.5, pytest.approx(0.25)]
