"""Import rules that import-linter can't express: what the core may import from outside, layout without a network."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
CORE = "megatron_fsdp_v2"
# What a module may use where it happens to be installed.
OPTIONAL = {f"{CORE}/explaining/text.py": {"rich"}}


def imported_names(source: str) -> Iterator[str]:
    """Every absolute dotted name a source imports, at any depth: `a.b` and `a.b.c` for `from a.b import c`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def uses_distributed(source: str) -> bool:
    """Whether a source imports torch.distributed, or reaches it as an attribute of torch."""
    attributes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    reached = {ast.unparse(node) for node in attributes} | set(imported_names(source))
    return any(f"{name}.".startswith("torch.distributed.") for name in reached)


def foreign_packages(source: str) -> set[str]:
    """Top-level packages a source imports besides the standard library, torch and the core itself."""
    allowed = sys.stdlib_module_names | {"torch", CORE}
    return {name.split(".")[0] for name in imported_names(source)} - allowed


def source_of(module: str) -> str:
    path = ROOT.joinpath(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def test_the_checks_see_what_they_look_for() -> None:
    assert foreign_packages("def f():\n    import numpy.linalg\n    from megatron.core import x") == {
        "numpy",
        "megatron",
    }
    assert foreign_packages("import os, torch.nn\nfrom megatron_fsdp_v2 import y\nfrom . import z") == set()
    for source in (
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "import torch\ntorch.distributed.get_rank()",
    ):
        assert uses_distributed(source)
    assert not uses_distributed("import torch\ntorch.zeros(1)")


def test_the_core_needs_torch_alone() -> None:
    found = {
        str(path.relative_to(ROOT)): packages
        for path in sorted((ROOT / CORE).rglob("*.py"))
        if (packages := foreign_packages(path.read_text()) - OPTIONAL.get(str(path.relative_to(ROOT)), set()))
    }
    assert found == {}


def test_layout_and_all_it_imports_stay_off_the_network() -> None:
    layout = f"{CORE}.sharding.layout"
    reachable = {layout} | grimp.build_graph(CORE, cache_dir=None).find_upstream_modules(layout)
    assert [name for name in reachable if uses_distributed(source_of(name))] == []


def test_importing_the_core_loads_neither_megatron_nor_the_adapter() -> None:
    program = "import sys, megatron_fsdp_v2; print(*(name for name in sys.modules if name.startswith('megatron')))"
    loaded = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    assert CORE in loaded
    adapter_start = {"megatron_fsdp_v2_mcore", "megatron_fsdp_v2_mcore.bootstrap", "megatron_fsdp_v2_mcore.environment"}
    assert [name for name in loaded if name.split(".")[0] != CORE and name not in adapter_start] == []
