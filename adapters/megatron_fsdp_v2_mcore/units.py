"""Which modules of a Megatron model become units of their own; the root keeps the parameters of the rest."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

from torch import nn

# Looked up in the classes a module's class derives from, so MoETransformerLayer and other subclasses count too.
DEFAULT_UNIT_NAMES = ("TransformerLayer", "MoETransformerLayer", "MambaLayer")
EMBEDDING = "embedding"
OUTPUT_LAYER = "output_layer"


def unresolvable_unit_names(names: Sequence[str]) -> list[tuple[str, str]]:
    """The dotted names that don't lead to a module class, each with the reason. Bare names need the model."""
    problems = []
    for name in names:
        if "." in name:
            try:
                _class_at(name)
            except (ImportError, AttributeError, TypeError) as error:
                problems.append((name, str(error)))
    return problems


def find_units(model: nn.Module, names: Sequence[str] = ()) -> list[nn.Module]:
    """Modules to shard before `model` itself, inner ones before those around them, in registration order.

    `names` are class names or dotted paths; without them the default layers count. The embedding and the output
    layer are units too unless they share their weight, which then has to stay with the root that hands it on.

    Raises:
        ValueError: a given name matches no module of `model`.
    """
    chosen = [module for module in _inner_first(model) if module is not model]
    wanted = tuple(names) or DEFAULT_UNIT_NAMES
    unmatched = [name for name in names if not any(_matches(module, name) for module in chosen)]
    if unmatched:
        raise ValueError(
            f"--fsdp-unit-modules {' '.join(unmatched)}: no module of {type(model).__name__} is of that class"
        )
    ends = _untied_ends(model)
    return [module for module in chosen if module in ends or any(_matches(module, name) for name in wanted)]


def output_layer(model: nn.Module) -> nn.Module | None:
    """The module that runs last in a forward and first in a backward, if it is a unit of its own."""
    module = getattr(model, OUTPUT_LAYER, None)
    return module if module in _untied_ends(model) else None


def _untied_ends(model: nn.Module) -> list[nn.Module]:
    if getattr(model, "share_embeddings_and_output_weights", True):
        return []
    ends = [getattr(model, name, None) for name in (EMBEDDING, OUTPUT_LAYER)]
    return [end for end in ends if isinstance(end, nn.Module) and any(True for _ in end.parameters())]


def _inner_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module


def _matches(module: nn.Module, name: str) -> bool:
    if "." in name:
        return isinstance(module, _class_at(name))
    return any(cls.__name__ == name for cls in type(module).__mro__)


def _class_at(path: str) -> type[nn.Module]:
    module_name, _, class_name = path.rpartition(".")
    found = getattr(importlib.import_module(module_name), class_name)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise TypeError(f"{path} is not a module class")
    return found
