"""Stock Megatron's dataset helpers as the pip package ships them."""

import functools
from collections.abc import Callable
from importlib import machinery, util
from pathlib import Path


def wrap_compile_helpers(original: Callable[[], None]) -> Callable[[], None]:
    """Skip building `helpers_cpp` where it's compiled already and nothing is there to build it with."""

    @functools.wraps(original)
    def compile_helpers() -> None:
        package = util.find_spec("megatron.core.datasets")
        folders = [Path(folder) for folder in (package.submodule_search_locations or ())] if package else []
        can_build = any((folder / "Makefile").exists() for folder in folders)
        compiled = any(
            (folder / f"helpers_cpp{suffix}").exists() for folder in folders for suffix in machinery.EXTENSION_SUFFIXES
        )
        if can_build or not compiled:
            original()

    return compile_helpers
