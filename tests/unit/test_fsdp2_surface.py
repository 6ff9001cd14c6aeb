"""The public surface of the installed torch's FSDP2 is there, so that the day it grows a test says what is new."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp._fully_shard as fsdp2

import megatron_fsdp_v2

# Of no use where `dp_mesh_dims` is refused.
NOT_OFFERED = {"DataParallelMeshDims"}
POLICIES = ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy")
FUNCTIONS = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")


def public_methods(cls: type) -> dict[str, Any]:
    """Methods a class defines itself or inherits from another one than `object`, by name."""
    return {name: value for name, value in inspect.getmembers(cls, callable) if not name.startswith("_")}


METHODS = sorted(public_methods(fsdp2.FSDPModule))


def differences(ours: Any, theirs: Any) -> list[str]:
    """In what a call that suits `theirs` wouldn't suit `ours`."""
    mine = inspect.signature(ours).parameters
    found = []
    for position, (name, param) in enumerate(inspect.signature(theirs).parameters.items()):
        own = mine.get(name)
        if own is None:
            found.append(f"parameter {param} is new")
        elif own.kind is not param.kind:
            found.append(f"parameter {name} is {param.kind.description} there and {own.kind.description} here")
        elif param.kind is not inspect.Parameter.KEYWORD_ONLY and list(mine).index(name) != position:
            found.append(f"parameter {name} is number {position} there and number {list(mine).index(name)} here")
        elif own.default is inspect.Parameter.empty and param.default is not inspect.Parameter.empty:
            found.append(f"parameter {name} has the default {param.default!r} there and none here")
    for name, own in mine.items():
        if name not in inspect.signature(theirs).parameters and own.default is inspect.Parameter.empty:
            found.append(f"parameter {name} must be given here and is unknown there")
    return found


def test_names() -> None:
    missing = set(fsdp2.__all__) - set(megatron_fsdp_v2.__all__) - NOT_OFFERED
    assert not missing, f"torch.distributed.fsdp has {sorted(missing)}, megatron_fsdp_v2 hasn't"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    found = differences(getattr(megatron_fsdp_v2, name), getattr(fsdp2, name))
    assert not found, f"{name} of the installed torch differs: {'; '.join(found)}"


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_a_sharded_module(name: str) -> None:
    method = getattr(megatron_fsdp_v2.FSDPModule, name, None)
    assert method is not None, f"FSDPModule.{name} is new: {inspect.signature(getattr(fsdp2.FSDPModule, name))}"
    found = differences(method, getattr(fsdp2.FSDPModule, name))
    assert not found, f"FSDPModule.{name} of the installed torch differs: {'; '.join(found)}"


@pytest.mark.parametrize("name", sorted(public_methods(fsdp2.UnshardHandle)))
def test_methods_of_a_handle(name: str) -> None:
    method = getattr(megatron_fsdp_v2.UnshardHandle, name, None)
    assert method is not None, f"UnshardHandle.{name} is new"
    assert not differences(method, getattr(fsdp2.UnshardHandle, name))


@pytest.mark.parametrize("name", POLICIES)
def test_fields_of_policies(name: str) -> None:
    """In the same order, since a policy may be written without names, and with the same defaults."""
    ours, theirs = [dataclasses.fields(getattr(module, name)) for module in (megatron_fsdp_v2, fsdp2)]
    described = [(field.name, field.default) for field in theirs]
    assert [(field.name, field.default) for field in ours][: len(theirs)] == described, f"{name} has other fields"
    assert all(field.default is not dataclasses.MISSING for field in ours)


def test_drift_is_named() -> None:
    """What the comparison says of a surface that grew."""

    def theirs(module: Any, count: int, *, mesh: Any = None, fresh=3) -> None: ...  # type: ignore[no-untyped-def]

    def ours(module: Any, mesh: Any = None, count: int = 0, *, own: int) -> None: ...

    assert differences(ours, theirs) == [
        "parameter count is number 1 there and number 2 here",
        "parameter mesh is keyword-only there and positional or keyword here",
        "parameter fresh=3 is new",
        "parameter own must be given here and is unknown there",
    ]


def test_everything_is_in_the_table() -> None:
    """Each argument, method and name has its word in the documentation."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "fsdp2.md").read_text()
    arguments = inspect.signature(megatron_fsdp_v2.fully_shard).parameters
    names = {*arguments, *METHODS, *fsdp2.__all__, *public_methods(megatron_fsdp_v2.FSDPModule)}
    missing = sorted(name for name in names if f"`{name}`" not in text)
    assert not missing, f"docs/fsdp2.md says nothing of {missing}"
