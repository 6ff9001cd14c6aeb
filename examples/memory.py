"""Memory over one training step, looked at after every operation."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Phase:
    """A part of a step: bytes of all tensors after each of its operations, the first one as it began."""

    name: str
    samples: list[int] = field(default_factory=list)


@dataclass
class MemoryOfAStep:
    """Bytes of one rank, of everything it holds: parameters, gradients, optimizer states, activations, buffers.

    ``peak`` may be above all samples on a GPU, whose allocator counts what lives only within an operation, too.
    """

    phases: list[Phase] = field(default_factory=list)
    peak: int = 0


class _Sampler(TorchDispatchMode):
    def __init__(self, current: Callable[[], int], phases: list[Phase]) -> None:
        super().__init__()
        self.current, self.phases = current, phases

    def begin(self, name: str) -> None:
        self.phases.append(Phase(name, [self.current()]))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # What the DTensor does to its local tensors comes by here again.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self.phases:
            self.phases[-1].samples.append(self.current())
        return result


class MemoryWatch:
    """Follows a training from before its model exists, so that no tensor escapes, and samples one of its steps.

    Tensors are counted by torch's ``MemTracker`` on the CPU and by the allocator on a GPU. The phases are the forward
    and the backward of each micro-batch (loss and gradient clipping included in the latter) and the optimizer.
    """

    def __init__(self, device: torch.device) -> None:
        self.memory = MemoryOfAStep()
        self._on_gpu = device.type == "cuda"
        self._root: nn.Module | None = None
        self._sampling: _Sampler | None = None
        self._forwards = 0

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around the whole training."""
        with ExitStack() as stack:
            # Before the tracker's own hook, which raises when the root's statistics of the last time are still there.
            stack.callback(register_module_forward_pre_hook(self._before_forward).remove)
            stack.callback(register_module_forward_hook(self._after_forward).remove)
            stack.callback(register_optimizer_step_pre_hook(lambda *_: self._begin("optimizer")).remove)
            if not self._on_gpu:
                # Takes seconds to import.
                from torch.distributed._tools.mem_tracker import MemTracker

                self._tracker = stack.enter_context(MemTracker())
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the step that is sampled."""
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._forwards = 0
        self._sampling = _Sampler(self._current, self.memory.phases)
        with self._sampling:
            yield
        self._sampling = None
        samples = max(max(phase.samples) for phase in self.memory.phases)
        self.memory.peak = torch.cuda.max_memory_allocated() if self._on_gpu else samples

    def _current(self) -> int:
        if self._on_gpu:
            return torch.cuda.memory_allocated()
        return sum(device["Total"] for device in self._tracker.get_tracker_snapshot().values())

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        # The first module that runs is the outermost one.
        self._root = self._root or module
        if module is self._root:
            if not self._on_gpu:
                self._tracker.reset_mod_stats()
            self._forwards += 1
            self._begin(f"forward {self._forwards}")

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._root:
            self._begin(f"backward {self._forwards}")

    def _begin(self, phase: str) -> None:
        if self._sampling:
            self._sampling.begin(phase)
