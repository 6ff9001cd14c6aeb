"""What is installed here, and what can run with it."""

import ast
import importlib
import importlib.metadata
import importlib.util
import site
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .bootstrap import ENV_CPU_EMULATION, ENV_DISABLE, OLDEST_PYTHON, python_problem, switched_on
from .signatures import module_file

MEGATRON_SERIES = (0, 19)
OLDEST_TORCH = (2, 11)
ACTIVATION_FILE = "megatron_fsdp_v2_activate.pth"

State = Literal["present", "absent", "half-installed", "unsupported", "unrelated", "hidden"]


@dataclass(frozen=True)
class Component:
    """One thing that was looked for, with its version where it has one and a sentence for people."""

    name: str
    state: State
    version: str | None = None
    detail: str = ""


def v2_problems() -> list[str]:
    """One line for each reason why v2 can't work with what is installed; empty if it can.

    Importing transformer-engine, if it's there, is the only slow part, and Megatron does the same a moment later.
    """
    problems = [problem for problem in (python_problem(), _megatron_problem(), _torch_problem()) if problem]
    # Megatron catches ImportError and goes on without transformer-engine; anything else ends its import.
    state, error = probe_transformer_engine()
    if state == "half-installed" and not isinstance(error, ImportError):
        problems.append(
            f"transformer-engine is half-installed ({_first_line(error)}) and megatron.core can't be imported beside "
            "it; repair it, or remove it with: pip uninstall transformer-engine"
        )
    return problems


def megatron_version() -> tuple[int, int, int] | None:
    """The version of the `megatron.core` that an import would find, read from its source, or None if it's absent.

    The metadata of an installed wheel would be wrong inside a Megatron-LM checkout, which comes first on the path.
    """
    file = module_file("megatron.core.package_info")
    if file is None:
        return None
    numbers = _integer_constants(file)
    try:
        return numbers["MAJOR"], numbers["MINOR"], numbers["PATCH"]
    except KeyError:
        return None


def _integer_constants(file: Path) -> dict[str, int]:
    return {
        target.id: node.value.value
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, int)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _megatron_problem() -> str | None:
    file = module_file("megatron.core")
    wanted = f"megatron-core {MEGATRON_SERIES[0]}.{MEGATRON_SERIES[1]}"
    if file is None:
        return f"{wanted} is not installed; install it with: pip install 'megatron-fsdp-v2[mcore]'"
    version = megatron_version()
    if version is None:
        return f"{wanted} is needed; {file.parent} doesn't say which version it is"
    if version[:2] != MEGATRON_SERIES:
        return f"{wanted} is needed; {file.parent} is {'.'.join(map(str, version))}"
    return None


def _torch_problem() -> str | None:
    version = installed_version("torch")
    if version is None:
        return "torch is not installed"
    if tuple(map(int, version.split("+")[0].split(".")[:2])) < OLDEST_TORCH:
        return f"torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer is needed, this is {version}"
    return None


def probe_transformer_engine() -> tuple[State, BaseException | None]:
    """Whether transformer-engine can be imported, and the error if it's there but can't."""
    if switched_on(ENV_CPU_EMULATION):
        return "hidden", None
    if importlib.util.find_spec("transformer_engine") is None:
        return "absent", None
    try:
        importlib.import_module("torch")
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        return "half-installed", error
    return "present", None


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def survey() -> list[Component]:
    """Every component that decides what can run, in the order `mfsdp2 doctor` prints them."""
    return [
        _python(),
        _torch(),
        _megatron(),
        _transformer_engine(),
        _apex(),
        _optional("emerging-optimizers", "emerging_optimizers", "Megatron's Muon and other newer optimizers"),
        _optional("psutil", "psutil", "saving torch_dist checkpoints"),
        _gpu(),
        *_communication(),
        _activation(),
    ]


def _python() -> Component:
    version = ".".join(map(str, sys.version_info[:3]))
    wanted = f"{OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer is needed"
    return Component("Python", "unsupported" if python_problem() else "present", version, wanted)


def _torch() -> Component:
    version = installed_version("torch")
    state: State = "absent" if version is None else "unsupported" if _torch_problem() else "present"
    return Component("torch", state, version, _torch_problem() or "")


def _megatron() -> Component:
    file, version, problem = module_file("megatron.core"), megatron_version(), _megatron_problem()
    state: State = "absent" if file is None else "unsupported" if problem else "present"
    where = str(file.parent) if file else ""
    return Component("megatron-core", state, ".".join(map(str, version)) if version else None, problem or where)


def _transformer_engine() -> Component:
    state, error = probe_transformer_engine()
    details = {
        "present": "fused layers and optimizers, fp8",
        "absent": "stock needs --transformer-impl local",
        "hidden": "by CPU emulation",
        "half-installed": f"{_first_line(error)}; repair it, or: pip uninstall transformer-engine",
    }
    return Component("transformer-engine", state, installed_version("transformer-engine"), details[state])


def _apex() -> Component:
    # `find_spec` answers None as well where CPU emulation has hidden the package.
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Component("apex", "absent", None, "optional: NVIDIA's fused Adam; torch's is used instead")
    if any((Path(folder) / "optimizers").is_dir() for folder in spec.submodule_search_locations or ()):
        return Component("apex", "present", installed_version("apex"), "NVIDIA's, with fused optimizers")
    return Component("apex", "unrelated", installed_version("apex"), "a web toolkit of the same name, not NVIDIA's")


def _optional(distribution: str, module: str, purpose: str) -> Component:
    found = importlib.util.find_spec(module) is not None
    return Component(distribution, "present" if found else "absent", installed_version(distribution), purpose)


def _gpu() -> Component:
    import torch

    if not torch.cuda.is_available():
        return Component("GPU", "absent", None, "training needs CPU emulation")
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    return Component("GPU", "present", torch.version.cuda, f"{torch.cuda.device_count()} x {', '.join(names)}")


def _communication() -> list[Component]:
    import torch

    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    nccl_version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    return [
        Component("NCCL", "present" if has_nccl else "absent", nccl_version, "collectives between GPUs"),
        Component("gloo", "present" if has_gloo else "absent", None, "collectives on the CPU"),
    ]


def _activation() -> Component:
    name = f"activation by {ACTIVATION_FILE}"
    if switched_on(ENV_DISABLE):
        return Component(name, "hidden", None, f"switched off by {ENV_DISABLE}")
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    if any((Path(folder) / ACTIVATION_FILE).is_file() for folder in folders):
        return Component(name, "present", None, "plain torchrun SCRIPT understands the flag")
    return Component(name, "absent", None, "start scripts with: mfsdp2 run SCRIPT")


def _first_line(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
