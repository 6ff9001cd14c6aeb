"""The exact figures of the benchmarks: how they are counted, and what is required of them. Nothing here is timed."""

import io
import json

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

import benchmarks.__main__ as command
from benchmarks import step, tables
from benchmarks.counting import StepCounter
from benchmarks.ranks import RankFailed, run_on_ranks
from benchmarks.results import HostFigures, StepFigures, StepResult
from benchmarks.variants import VARIANTS


def test_counter_takes_written_bytes_and_no_views():
    a, b = torch.ones(4, 4), torch.ones(4, 4)
    with StepCounter() as counter:
        a.copy_(b)
        a.view(16).narrow(0, 0, 8).detach()
        torch.empty(1000)
        torch._foreach_copy_([a, b], [b, a])
        torch.cat([a, b])
    assert counter.written == {"aten::copy_": 64, "aten::_foreach_copy_": 128, "aten::cat": 128}
    assert not counter.calls


def counted_collectives(rank, world_size):
    small, whole = torch.ones(3), torch.ones(3 * world_size)
    with StepCounter() as counter:
        dist.all_gather_into_tensor(whole, small)
        dist.all_reduce(whole)
        with dist._coalescing_manager(group=dist.group.WORLD, async_ops=True) as manager:
            dist.all_gather_into_tensor(whole, small, async_op=True)
            dist.all_gather_into_tensor(whole.clone(), small, async_op=True)
        manager.wait()
    return dict(counter.calls), dict(counter.payload)


def test_counter_takes_a_coalesced_call_for_one(ranks):
    calls, payload = ranks(2).run(counted_collectives)[0]
    assert calls == {"all-gather": 2, "all-reduce": 1}
    assert payload == {"all-gather": 3 * 24, "all-reduce": 24}


def exact_figures(rank, world_size):
    step.BATCH, step.SEQUENCE, step.WARMUP = 1, 8, 1
    wanted = ("FSDP2", "v2 ZeRO-3")
    return step.measure(lambda text: None, 0, [variant for variant in VARIANTS if variant.name in wanted])


def test_zero3_meets_the_requirements(ranks):
    result = ranks(2).run(exact_figures, timeout=300)[0]
    assert [text for text, met in tables.requirements(result) if not met] == []
    mine = result.of("v2 ZeRO-3")
    assert mine.copied - mine.copied_by_backend == pytest.approx(result.parameter_bytes, rel=0.01)
    # The anchor for the way of counting: what FSDP2 copies follows from its source.
    assert result.of("FSDP2").copied == pytest.approx(4.5 * result.parameter_bytes, rel=0.01)
    assert result.of("FSDP2").copied_by_backend == pytest.approx(0.5 * result.parameter_bytes, rel=0.01)
    assert result.of("FSDP2").calls == {"all-gather": 18, "reduce-scatter": 9}


def a_result():
    theirs = StepFigures(
        "FSDP2", None, {"all-gather": 2}, {"all-gather": 100}, {"aten::copy_": 400}, 50, 1000, [2.0], [2.0]
    )
    mine = StepFigures(
        "v2 ZeRO-3", "FSDP2", {"all-gather": 3}, {"all-gather": 102}, {"aten::copy_": 210}, 50, 900, [1.0], [1.0]
    )
    return StepResult(100, [theirs, mine])


def test_a_missed_requirement_shows():
    assert [met for _, met in tables.requirements(a_result())] == [False, False, False]


def test_tables_hold_the_ratios():
    out = Console(width=250, record=True, file=io.StringIO())
    host = [
        HostFigures("plain modules", [10.0], [10.0]),
        HostFigures("FSDP2", [110.0], [60.0]),
        HostFigures("v2", [35.0], [35.0]),
    ]
    for table in (tables.exact_table(a_result()), tables.time_table(a_result()), tables.copy_table(a_result())):
        out.print(table)
    out.print(tables.host_table(host))
    text = out.export_text()
    assert "1.0200" in text
    assert "0.90" in text
    assert "0.50" in text
    assert "0.32" in text
    assert "0.25" in text


def failing(tell):
    raise ValueError("the reason")


def test_a_failed_rank_ends_the_run_with_its_traceback():
    with pytest.raises(RankFailed, match="the reason"):
        run_on_ranks(failing, 1, 1, "gloo", lambda text: None)


def test_command_writes_every_value(monkeypatch, tmp_path):
    monkeypatch.setattr(step, "run", lambda rounds, tell: a_result())
    target = tmp_path / "figures.json"
    outcome = CliRunner().invoke(command.app, ["step", "--quick", "--json", str(target)])
    assert outcome.exit_code == 0, outcome.output
    assert "MISSED" in outcome.output
    assert json.loads(target.read_text())["step"]["variants"][1]["seconds"] == [1.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["steps"], "steps"), (["step", "--json", "/no/such/folder/x.json"], "no folder /no/such/folder")],
)
def test_command_refuses_what_it_cannot_do(arguments, said):
    outcome = CliRunner().invoke(command.app, arguments)
    assert outcome.exit_code == 2
    assert said in outcome.output
