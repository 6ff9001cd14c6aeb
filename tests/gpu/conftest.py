"""The gpu tier runs where CUDA does, and says why elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False here")
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(skip)
