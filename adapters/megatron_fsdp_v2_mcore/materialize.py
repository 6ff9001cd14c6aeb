"""Brings a unit's parameters and buffers onto the compute device, initialising those that were built on meta."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

# Parallel layers without a `reset_parameters` of their own, with the method of the configuration that fills them.
_WEIGHT_METHODS = {
    "ColumnParallelLinear": "init_method",
    "RowParallelLinear": "output_layer_init_method",
    "VocabParallelEmbedding": "embedding_init_method",
}


class Materializer:
    """Handles every module once, also when it's called for a unit and later for the unit around it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: set[nn.Module] = set()
        # Parameters that had to be rebuilt, so that tied ones stay tied.
        self._successors: dict[nn.Parameter, nn.Parameter] = {}

    def __call__(self, unit: nn.Module) -> None:
        """Moves what `unit` holds to the device and initialises its meta parameters by their modules' own means.

        Attributes that were set on a parameter go with it.

        Raises:
            RuntimeError: a module with meta parameters has no way to initialise them.
        """
        for module in unit.modules():
            if module not in self._done:
                self._done.add(module)
                self._materialize(module)

    def _materialize(self, module: nn.Module) -> None:
        originals = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        fresh = [name for name, parameter in originals.items() if self._place(module, name, parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != self._device:
                empty = torch.empty_like(buffer, device=self._device)
                module._buffers[name] = empty if buffer.is_meta else buffer.to(self._device)
        if not fresh:
            return
        _initializer(module)()
        for name in fresh:
            # Some modules wrap their parameters anew while initialising them.
            successor = module._parameters[name]
            assert successor is not None
            successor.__dict__.update(originals[name].__dict__)
            self._successors[originals[name]] = successor

    def _place(self, module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
        """Puts one parameter on the device; returns whether it still has to be initialised."""
        if parameter in self._successors:
            module._parameters[name] = self._successors[parameter]
        elif parameter.is_meta:
            empty = torch.empty_like(parameter, device=self._device)
            module._parameters[name] = nn.Parameter(empty, parameter.requires_grad)
            return True
        elif parameter.device != self._device:
            parameter.data = parameter.data.to(self._device)
        return False


def _initializer(module: nn.Module) -> Callable[[], object]:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            return method
    known = next(
        (_WEIGHT_METHODS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _WEIGHT_METHODS), None
    )
    if known is None:
        raise RuntimeError(
            f"{type(module).__name__} was built on the meta device and has no reset_parameters(): "
            "give the class that method or drop --init-model-with-meta-device"
        )
    return lambda: _fill(module, getattr(module.config, known))


@torch.no_grad()
def _fill(module: nn.Module, init_method: Callable[[torch.Tensor], object]) -> None:
    init_method(module.weight)
    if isinstance(bias := getattr(module, "bias", None), torch.Tensor):
        bias.zero_()
