"""Applies the patch table while Megatron is being imported.

The hook is a finder on `sys.meta_path`. It finds nothing itself: it lets the others find a Megatron module and adds a
step before or after the module's code runs. What a process has switched on hangs on the hook, not on this module.
"""

import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn, TextIO

from . import patches
from .bootstrap import ENV_ACTIVE, ENV_CPU_EMULATION, switched_on
from .patches import CPU, EXPLAIN, V2, Mode, Patch

# Everything in Megatron imports this package first, so the checks run before any of its code.
ENTRY_MODULE = "megatron.core"


class MegatronImportHook(importlib.abc.MetaPathFinder):
    """Checks the environment when Megatron starts to load, then applies each row after its module has loaded."""

    def __init__(self) -> None:
        self.modes: set[Mode] = set()
        self.undo_cpu_emulation: Callable[[], None] | None = None
        self.explains_to: TextIO | None = None
        self.explains_as_json = False
        self._undo: dict[Patch, Callable[[], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != ENTRY_MODULE and not patches.rows_for(self.modes, fullname):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _HookedLoader(spec.loader, self)
                return spec
        return None

    def before_loading(self, name: str) -> None:
        if name != ENTRY_MODULE:
            return
        if CPU in self.modes:
            from . import cpu_emulation

            try:
                cpu_emulation.enable()
            except RuntimeError as error:
                refuse([str(error)])
        problems = self.problems()
        if problems:
            refuse(problems)

    def problems(self) -> list[str]:
        """One line for each reason why the modes that are on can't work with what is installed."""
        from . import environment, signatures

        unfit = environment.v2_problems() if V2 in self.modes else []
        return unfit or signatures.moved(patches.rows_for(self.modes))

    def after_loading(self, module: ModuleType) -> None:
        for row in patches.rows_for(self.modes, module.__name__):
            self._apply(row, module)

    def add_modes(self, modes: set[Mode]) -> None:
        """Switch further modes on; modules that are loaded already are patched at once."""
        self.modes |= modes
        for row in patches.rows_for(self.modes):
            module = patches.imported_module(row.module)
            if module is not None:
                self._apply(row, module)

    def remove_mode(self, mode: Mode) -> None:
        """Switch a mode off. Rows may sit on one another, so all are undone and the others applied again."""
        self.modes.discard(mode)
        while self._undo:
            self._undo.popitem()[1]()
        self.add_modes(set())

    def _apply(self, row: Patch, module: ModuleType) -> None:
        if row not in self._undo:
            self._undo[row] = patches.apply(row, module)


class _HookedLoader(importlib.abc.Loader):
    """Stands before a module's own loader for the moment of loading, then leaves the module as it would have been."""

    def __init__(self, loader: importlib.abc.Loader, hook: MegatronImportHook) -> None:
        self._loader = loader
        self._hook = hook

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._hook.before_loading(module.__name__)
        self._loader.exec_module(module)
        self._hook.after_loading(module)


def installed_hook() -> MegatronImportHook | None:
    """The hook of this process, if there is one."""
    return next((finder for finder in sys.meta_path if isinstance(finder, MegatronImportHook)), None)


def install(v2: bool = False, cpu_emulation: bool = False) -> MegatronImportHook:
    """Put the hook in place, or widen the one that's there; imports neither torch nor Megatron.

    Args:
        v2: apply the rows that `--use-megatron-fsdp-v2` needs, here and in child processes.
        cpu_emulation: stand in for CUDA as soon as Megatron loads; also on when the environment variable asks for it.
    """
    hook = installed_hook()
    if hook is None:
        hook = MegatronImportHook()
        sys.meta_path.insert(0, hook)
    modes: set[Mode] = set()
    if v2:
        modes.add(V2)
        os.environ[ENV_ACTIVE] = "1"
    if cpu_emulation or switched_on(ENV_CPU_EMULATION):
        modes.add(CPU)
    hook.add_modes(modes)
    return hook


def install_explanation(file: TextIO, as_json: bool) -> None:
    """Have this process explain its v2 model to ``file`` and end where its first step would begin."""
    hook = install(v2=True)
    hook.explains_to, hook.explains_as_json = file, as_json
    hook.add_modes({EXPLAIN})


def uninstall(mode: Mode) -> None:
    """Undo what `install` did for one mode; the hook goes with its last mode."""
    if mode == V2:
        os.environ.pop(ENV_ACTIVE, None)
    hook = installed_hook()
    if hook is None:
        return
    hook.remove_mode(mode)
    if not hook.modes:
        sys.meta_path.remove(hook)


def register() -> None:
    """See `megatron_fsdp_v2_mcore.register`."""
    wanted = MegatronImportHook()
    wanted.modes.add(V2)
    problems = wanted.problems()
    if problems:
        raise RuntimeError("\n".join(problems))
    install(v2=True)


def unregister() -> None:
    """See `megatron_fsdp_v2_mcore.unregister`."""
    uninstall(V2)


def on_first_rank() -> bool:
    """Whether this process is the one that speaks for all ranks; spawned children never do."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    # A spawned child that is still importing the main script doesn't know its parent yet.
    spawned = "--multiprocessing-fork" in sys.orig_argv
    is_child = spawned or (multiprocessing is not None and multiprocessing.parent_process() is not None)
    return os.environ.get("RANK", "0") == "0" and not is_child


def refuse(problems: list[str]) -> NoReturn:
    """End this process with one line per problem, printed once per machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write("".join(f"megatron_fsdp_v2: {problem}\n" for problem in problems))
    raise SystemExit(1)
