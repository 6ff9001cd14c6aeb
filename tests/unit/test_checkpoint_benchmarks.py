"""How the costs of checkpoints are measured and shown. Nothing here asserts a time."""

import io
import json

import torch.distributed as dist
from rich.console import Console
from typer.testing import CliRunner

import benchmarks.__main__ as command
from benchmarks import checkpoint, checkpoint_tables, preparation
from benchmarks.ranks import run_on_ranks
from benchmarks.results import PreparationFigures, StorageFigures, StorageResult


def small_storage(rank, world_size):
    checkpoint.LAYERS, checkpoint.WIDTH, checkpoint.INNER = 2, 8, 3
    return checkpoint.measure(lambda text: None, 2)


def test_both_sides_are_saved_and_loaded_in_every_round(ranks):
    result = ranks(2).run(small_storage, timeout=120)[0]
    # Weights and two states, in fp32, of two layers with 6 rows of 8 and 8 rows of 3.
    assert result.state_bytes == 3 * 4 * 2 * (6 * 8 + 8 * 3)
    assert [side.name for side in result.sides] == ["DCP", "v2"]
    assert [(len(side.save), len(side.load)) for side in result.sides] == [(2, 2), (2, 2)]


def small_preparation(tell):
    assert dist.get_world_size() == 256
    return preparation.measure(tell, 2, (1, 4))


def test_every_key_of_a_prepared_model_is_counted():
    figures = run_on_ranks(small_preparation, 1, 256, "fake", lambda text: None)[0]
    assert [(row.layers, len(row.seconds)) for row in figures] == [(1, 2), (4, 2)]
    # Parameters as counted in test_growth. Weights and two states of each with a matrix more for every fused one; and
    # a count of steps for each; and the options of the optimizer.
    dense = 3 + 11
    whole = 3 + 3 * 11 + 524
    assert [row.keys for row in figures] == [4 * dense + 3 * 1 + 1, 4 * whole + 3 * (3 + 257) + 1]


def a_result():
    return StorageResult(
        300 * 2**20,
        [
            StorageFigures("DCP", [1.0, 2.0, 9.0], [0.1, 0.1, 0.1]),
            StorageFigures("v2", [2.1, 2.2, 2.3], [0.2, 0.2, 0.2]),
        ],
    )


def test_ratios_are_those_of_medians():
    assert [met for _, met in checkpoint_tables.requirements(a_result())] == [True, False]
    out = Console(width=200, record=True, file=io.StringIO())
    out.print(checkpoint_tables.storage_table(a_result()))
    out.print(
        checkpoint_tables.preparation_table(
            [PreparationFigures(1, 1000, [0.5, 0.1]), PreparationFigures(2, 2000, [0.3])]
        )
    )
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.export_text().splitlines()]
    assert ["v2", "2100", "2200", "1.10", "200", "200", "2.00"] in lines
    assert ["1", "1,000", "0.10", "100", "1.00"] in lines
    assert ["2", "2,000", "0.30", "150", "1.50"] in lines


def test_command_measures_checkpoints_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint, "run", lambda rounds, tell: a_result())
    monkeypatch.setattr(preparation, "run", lambda rounds, tell: [PreparationFigures(1, 10, [0.5])])
    target = tmp_path / "figures.json"
    outcome = CliRunner().invoke(command.app, ["checkpoint", "--quick", "--json", str(target)])
    assert outcome.exit_code == 0, outcome.output
    assert "MISSED: load 2.00" in outcome.output
    written = json.loads(target.read_text())
    assert list(written) == ["checkpoint"]
    assert written["checkpoint"]["storage"]["sides"][0]["save"] == [1.0, 2.0, 9.0]
    assert written["checkpoint"]["preparation"][0]["keys"] == 10
