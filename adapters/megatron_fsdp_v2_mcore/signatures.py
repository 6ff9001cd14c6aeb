"""Compares the patch table with the Megatron that is installed, by reading its source: nothing is imported."""

import ast
import copy
import functools
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from .patches import Patch

Status = Literal["ok", "moved", "module absent"]

# Deeper chains of re-exports than this would mean a cycle.
_LONGEST_IMPORT_CHAIN = 5


def check(row: Patch) -> tuple[Status, str | None]:
    """Whether a row's target is where the table expects it, and the parameters found there (None: no such name)."""
    if module_file(row.module) is None:
        return "module absent", None
    found = signature_of(row.module, row.attribute)
    return ("ok" if found == row.signature else "moved"), found


def moved(rows: Iterable[Patch]) -> list[str]:
    """One line per row that doesn't fit the installed Megatron; empty if all do."""
    lines = []
    for row in rows:
        status, found = check(row)
        if status == "module absent":
            lines.append(f"{row.target} has moved: there is no module {row.module}")
        elif status == "moved":
            seen = "there is no such name" if found is None else f"found {found}"
            lines.append(f"{row.target} has moved: expected {row.signature}, {seen}")
    return lines


def signature_of(module: str, attribute: str) -> str | None:
    """The parameters of a function, method or class (its own `__init__`), or None if the module defines no such name.

    Names, defaults, `*` and `/` are kept, annotations are not: `(args, defaults={})`. A name that the module imports is
    followed to where it's defined.
    """
    return _signature_in(module, attribute.split("."), _LONGEST_IMPORT_CHAIN)


def module_file(name: str) -> Path | None:
    """The source file of a module or package, found through `sys.path` without importing any parent."""
    top, *rest = name.split(".")
    for folder in _package_folders(top):
        stem = folder.joinpath(*rest)
        for candidate in (stem / "__init__.py", stem.with_name(stem.name + ".py") if rest else None):
            if candidate is not None and candidate.is_file():
                return candidate
    return None


def _package_folders(top: str) -> Iterator[Path]:
    imported = sys.modules.get(top)
    if imported is not None:
        yield from map(Path, getattr(imported, "__path__", ()))
        return
    spec = PathFinder.find_spec(top)
    if spec is not None:
        yield from map(Path, spec.submodule_search_locations or ())


def _signature_in(module: str, path: list[str], imports_left: int) -> str | None:
    file = module_file(module)
    if file is None:
        return None
    node = _definition(_tree(file), path[0])
    if isinstance(node, ast.ImportFrom):
        source = _imported_from(module, file, node)
        name = next(alias.name for alias in node.names if (alias.asname or alias.name) == path[0])
        return _signature_in(source, [name, *path[1:]], imports_left - 1) if imports_left else None
    for part in path[1:]:
        node = _definition(node, part) if isinstance(node, ast.ClassDef) else None
    if isinstance(node, ast.ClassDef):
        node = _definition(node, "__init__")
    return _parameters(node) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None


@functools.lru_cache(maxsize=32)
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def _definition(scope: ast.Module | ast.ClassDef, name: str) -> ast.stmt | None:
    """The last statement that binds `name` in a scope, also inside its `if` and `try` blocks."""
    found = None
    for node in _statements(scope.body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound = node.name == name
        elif isinstance(node, ast.ImportFrom):
            bound = any((alias.asname or alias.name) == name for alias in node.names)
        else:
            bound = False
        found = node if bound else found
    return found


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)
            yield from _statements(node.orelse)


def _imported_from(module: str, file: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = copy.deepcopy(node.args)
    for part in ast.walk(arguments):
        if isinstance(part, ast.arg):
            part.annotation = None
    return f"({ast.unparse(arguments)})"
