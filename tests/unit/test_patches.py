"""The patch table, its signature checks and the import hook, on a small stand-in for Megatron and on its source."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megatron_fsdp_v2_mcore import environment, import_hook, patches, register, signatures, unregister
from megatron_fsdp_v2_mcore.bootstrap import ENV_ACTIVE, ENV_CPU_EMULATION
from megatron_fsdp_v2_mcore.patches import CPU, EXPLAIN, V2, Patch

needs_megatron = pytest.mark.skipif(signatures.module_file("megatron.core") is None, reason="megatron-core is absent")

_SOURCES = {
    "core/__init__.py": "",
    "functions.py": """
        def double(x: int, *, by: int = 2) -> int:
            return x * by

        async def wait(first, /, *rest, **more): ...

        def caller(x):
            return double(x)
    """,
    "classes.py": """
        class Wrapper:
            kind = "stock"

            def __init__(self, module: object, size: int = 1):
                self.module, self.size = module, size

            def method(self, a, b=None): ...

        class Bare: ...
    """,
    "consumer.py": """
        from .functions import double as twice

        try:
            import nowhere
        except ImportError:
            def fallback(a): ...

        def use(x):
            return twice(x)
    """,
}

# Replacements, written as the adapter writes its own.
_IMPLEMENTATIONS = """
    def add_one(original):
        return lambda *args, **kwargs: original(*args, **kwargs) + 1

    def add_ten(original):
        return lambda *args, **kwargs: original(*args, **kwargs) + 10

    def dispatch(cls):
        class Replaced(cls):
            kind = "v2"

        def new(klass, *args, **kwargs):
            return object.__new__(Replaced if klass is cls and kwargs.get("size") == 2 else klass)

        cls.__new__ = new
"""


def row(module: str, attribute: str, signature: str, implementation: str = "add_one", **fields: Any) -> Patch:
    """A table row on the stand-in package."""
    target = f"mockatron_implementations:{implementation}"
    return Patch(f"mockatron.{module}", attribute, fields.pop("kind", "wrap"), signature, "test", target, **fields)


DOUBLE = row("functions", "double", "(x, *, by=2)")


@pytest.fixture
def mockatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in package on `sys.path`, and an environment in which only the table decides."""
    for name, source in {**_SOURCES, "../mockatron_implementations.py": _IMPLEMENTATIONS}.items():
        file = tmp_path / "mockatron" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(line[len(source) - len(source.lstrip()) - 1 :] for line in source.split("\n")))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(import_hook, "ENTRY_MODULE", "mockatron.core")
    monkeypatch.setattr(environment, "v2_problems", list)
    for variable in (ENV_ACTIVE, ENV_CPU_EMULATION):
        monkeypatch.delenv(variable, raising=False)
    importlib.invalidate_caches()
    yield tmp_path / "mockatron"
    import_hook.uninstall(CPU)
    unregister()
    for name in [name for name in sys.modules if name.split(".")[0] in ("mockatron", "mockatron_implementations")]:
        del sys.modules[name]


def use_table(monkeypatch: pytest.MonkeyPatch, *rows: Patch) -> None:
    monkeypatch.setattr(patches, "PATCHES", rows)


def load(name: str) -> Any:
    return importlib.import_module(f"mockatron.{name}")


@pytest.mark.usefixtures("mockatron")
@pytest.mark.parametrize(
    ("module", "attribute", "expected"),
    [
        ("functions", "double", "(x, *, by=2)"),
        ("functions", "wait", "(first, /, *rest, **more)"),
        ("classes", "Wrapper", "(self, module, size=1)"),
        ("classes", "Wrapper.method", "(self, a, b=None)"),
        ("consumer", "twice", "(x, *, by=2)"),
        ("consumer", "fallback", None),
        ("functions", "triple", None),
        ("classes", "Bare", None),
        ("absent", "double", None),
    ],
)
def test_signatures_are_read_without_importing(module: str, attribute: str, expected: str | None) -> None:
    assert signatures.signature_of(f"mockatron.{module}", attribute) == expected
    assert "mockatron" not in sys.modules


@pytest.mark.usefixtures("mockatron")
def test_rows_are_applied_when_their_module_loads_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, DOUBLE)
    register()
    assert "mockatron" not in sys.modules
    functions = load("functions")
    assert (functions.double(3), functions.caller(3)) == (7, 7)
    unregister()
    assert (functions.double(3), functions.caller(3)) == (6, 6)
    assert import_hook.installed_hook() is None


@pytest.mark.usefixtures("mockatron")
def test_a_module_that_is_loaded_already_is_patched_at_once_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, DOUBLE)
    functions = load("functions")
    register()
    register()
    assert functions.caller(3) == 7


@pytest.mark.usefixtures("mockatron")
def test_rebinding_reaches_the_consumer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, row("consumer", "twice", "(x, *, by=2)", kind="rebind"))
    register()
    assert (load("consumer").use(3), load("functions").caller(3)) == (7, 6)


@pytest.mark.usefixtures("mockatron")
def test_dispatch_returns_a_subclass_on_request_and_leaves_the_class_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, row("classes", "Wrapper", "(self, module, size=1)", "dispatch", kind="new-dispatch"))
    register()
    wrapper = load("classes").Wrapper
    assert (wrapper("m", size=2).kind, wrapper("m", size=1).kind) == ("v2", "stock")
    assert isinstance(wrapper("m", size=2), wrapper)
    unregister()
    restored = wrapper("m", size=2)
    assert (restored.kind, restored.size) == ("stock", 2)


@pytest.mark.usefixtures("mockatron")
def test_leaving_one_mode_keeps_the_rows_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, DOUBLE, row("functions", "double", "(x, *, by=2)", "add_ten", modes=(CPU,)))
    register()
    import_hook.install(cpu_emulation=True)
    functions = load("functions")
    assert functions.double(3) == 17
    unregister()
    assert functions.double(3) == 16
    import_hook.uninstall(CPU)
    assert functions.double(3) == 6


MOVED = [
    (row("functions", "double", "(x)"), "mockatron.functions.double has moved: expected (x), found (x, *, by=2)"),
    (row("functions", "gone", "(x)"), "mockatron.functions.gone has moved: expected (x), there is no such name"),
    (row("nowhere", "f", "()"), "mockatron.nowhere.f has moved: there is no module mockatron.nowhere"),
]


@pytest.mark.usefixtures("mockatron")
def test_register_refuses_what_has_moved_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, DOUBLE, *(broken for broken, _ in MOVED))
    functions = load("functions")
    with pytest.raises(RuntimeError) as refusal:
        register()
    assert str(refusal.value).splitlines() == [line for _, line in MOVED]
    assert functions.double(3) == 6
    assert import_hook.installed_hook() is None


@pytest.mark.usefixtures("mockatron")
def test_a_run_that_asked_ends_before_any_code_of_megatron(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_table(monkeypatch, *(broken for broken, _ in MOVED))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    import_hook.install(v2=True)
    with pytest.raises(SystemExit) as refusal:
        load("core")
    assert refusal.value.code == 1
    assert capsys.readouterr().err.splitlines() == [f"megatron_fsdp_v2: {line}" for _, line in MOVED]
    assert "mockatron.core" not in sys.modules
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit):
        load("core")
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("mockatron")
def test_a_loaded_module_looks_as_if_nobody_had_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load("functions")
    expected = type(plain.__spec__.loader), type(plain.__loader__)
    del sys.modules["mockatron.functions"]
    use_table(monkeypatch, DOUBLE)
    register()
    assert importlib.util.find_spec("mockatron.functions").loader.get_source("mockatron.functions").strip()
    watched = load("functions")
    assert watched is not plain
    assert (type(watched.__spec__.loader), type(watched.__loader__)) == expected


@needs_megatron
@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: f"{patch.target}-{patch.modes[0]}")
def test_the_installed_megatron_is_as_the_table_says(patch: Patch) -> None:
    assert signatures.check(patch) == ("ok", patch.signature)


def test_every_row_says_why_and_names_an_implementation_that_exists() -> None:
    for patch in patches.PATCHES:
        module, function = patch.implementation.split(":")
        assert signatures.signature_of(module, function) in ("(original)", "(cls)"), patch.implementation
        assert patch.reason
        assert set(patch.modes) <= {V2, CPU, EXPLAIN}
    targets = [(patch.target, mode) for patch in patches.PATCHES for mode in patch.modes]
    assert len(set(targets)) == len(targets)
