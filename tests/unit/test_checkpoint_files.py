"""Parts of larger tensors are saved from where they are, and by themselves."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_fsdp_v2.checkpoint.files import FlatSavePlanner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64)


def whole() -> dict[str, torch.Tensor]:
    """A tensor of 1000 elements of every kind."""
    values = torch.randint(0, 2, (1000,))
    return {str(dtype): values.to(torch.float32).to(dtype) for dtype in DTYPES}


def save(state: dict[str, torch.Tensor], path: Path) -> int:
    """Bytes of the file."""
    planner = FlatSavePlanner({key: (key,) for key in state})
    dcp.save(dict(state), checkpoint_id=path, planner=planner, no_dist=True)
    return (path / "__0_0.distcp").stat().st_size


def check(state: dict[str, torch.Tensor], path: Path) -> None:
    """DCP's own planner reads what was saved."""
    loaded = {key: torch.zeros_like(value, memory_format=torch.contiguous_format) for key, value in state.items()}
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    for key, value in state.items():
        assert torch.equal(loaded[key].view(-1).view(torch.uint8), value.contiguous().view(-1).view(torch.uint8)), key


def test_rows_are_written_without_a_copy(tmp_path: Path) -> None:
    rows = {key: value[120:360].view(24, 10) for key, value in whole().items()}
    with mock.patch.object(torch.Tensor, "clone", side_effect=AssertionError("copied")):
        size = save(rows, tmp_path / "rows")
    check(rows, tmp_path / "rows")
    # As large as if they had never been parts of anything.
    assert size == save({key: value.clone() for key, value in rows.items()}, tmp_path / "clones")


@pytest.mark.parametrize("part", ["transposed", "scalar", "nothing", "conjugate"])
def test_other_parts(tmp_path: Path, part: str) -> None:
    state = {
        "transposed": {key: value.view(50, 20).t()[3:9] for key, value in whole().items()},
        "scalar": {key: value[7] for key, value in whole().items()},
        "nothing": {key: value[7:7] for key, value in whole().items()},
        "conjugate": {"x": torch.randn(20, dtype=torch.complex64)[5:9].conj()},
    }[part]
    save(state, tmp_path)
    check({key: value.resolve_conj() for key, value in state.items()}, tmp_path)
