"""What answers for CUDA while CPU emulation is on: one table, each row with its reason.

Three families: questions about the device get fixed answers, streams and events do nothing because CPU work is done
when a call returns, and everything that takes a device lands on the CPU.
"""

import functools
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _device as torch_device_utils

_CPU = torch.device("cpu")
# Hopper: old enough that Megatron takes no Blackwell-only branch, new enough for bf16 and fp8 checks.
_CAPABILITY = (9, 0)
# Large enough that no pre-allocation check fails; says nothing about this machine.
_MEMORY_BYTES = 1 << 34


class Event:
    """An event that has always happened already."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


class Stream:
    """A stream whose work is finished as soon as it has been issued."""

    cuda_stream = 0
    stream_id = 0
    device = _CPU

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None:
        pass


_STREAM = Stream()


@dataclass(frozen=True)
class StandIn:
    """One replaced attribute: `make` gets what stood there (None if nothing did) and returns the stand-in."""

    owner: object
    name: str
    make: Callable[[Any], Any]
    reason: str


def stand_ins() -> list[StandIn]:
    """Every stand-in, built from the torch that is installed."""
    return [*_questions(), *_streams(), *_random_state(), *_device_arguments(), *_tensor_methods()]


def _value(result: object) -> Callable[[Any], Callable[..., Any]]:
    """A function that ignores its arguments and returns `result`."""
    return lambda original: lambda *args, **kwargs: result


def _questions() -> list[StandIn]:
    properties = SimpleNamespace(
        name="cpu",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        multi_processor_count=1,
        total_memory=_MEMORY_BYTES,
    )
    cuda = torch.cuda
    one_device = "Megatron initialises its process groups only where it sees a device"
    memory = "memory reports go to the log and read as zero"
    architecture = "argument checks ask for the architecture"
    return [
        StandIn(cuda, "is_available", _value(True), one_device),
        StandIn(cuda, "device_count", _value(1), one_device),
        StandIn(cuda, "current_device", _value(0), one_device),
        StandIn(cuda, "set_device", _value(None), one_device),
        StandIn(cuda, "device", lambda original: lambda *args: nullcontext(), one_device),
        StandIn(cuda, "get_device_properties", _value(properties), architecture),
        StandIn(cuda, "get_device_capability", _value(_CAPABILITY), architecture),
        StandIn(cuda, "get_device_name", _value("cpu"), architecture),
        StandIn(cuda, "memory_stats", lambda original: lambda *args: defaultdict(int), memory),
        StandIn(cuda, "mem_get_info", _value((_MEMORY_BYTES, _MEMORY_BYTES)), memory),
        StandIn(cuda, "device_memory_used", _value(0), memory),
        StandIn(cuda, "is_current_stream_capturing", _value(False), "no graph is ever captured"),
        StandIn(
            torch.accelerator,
            "current_accelerator",
            _value(None),
            "torch itself (optimizers, data loaders) must not follow a device that isn't there",
        ),
        StandIn(torch.accelerator, "is_available", _value(False), "as current_accelerator"),
    ]


def _streams() -> list[StandIn]:
    cuda = torch.cuda
    reason = "work on the CPU is finished when the call returns, so there is nothing to order"
    return [
        StandIn(cuda, "Stream", lambda original: Stream, reason),
        StandIn(cuda, "Event", lambda original: Event, reason),
        StandIn(cuda, "current_stream", _value(_STREAM), reason),
        StandIn(cuda, "default_stream", _value(_STREAM), reason),
        StandIn(cuda, "set_stream", _value(None), reason),
        StandIn(cuda, "stream", lambda original: lambda stream: nullcontext(), reason),
        StandIn(cuda, "synchronize", _value(None), reason),
    ]


def _random_state() -> list[StandIn]:
    def get_state(original: Any) -> Callable[..., torch.Tensor]:
        return lambda device=None: torch.get_rng_state()

    def set_state(original: Any) -> Callable[..., None]:
        return lambda state, device=None: torch.set_rng_state(state)

    def call_now(original: Any) -> Callable[..., None]:
        return lambda callback, **kwargs: callback()

    def seed(original: Any) -> Callable[[int], Any]:
        return lambda value: torch.manual_seed(value)

    cuda = torch.cuda
    reason = "Megatron's tensor-parallel random states are CUDA states; the CPU generator takes their place"
    lazily = "would initialise CUDA"
    return [
        StandIn(cuda, "get_rng_state", get_state, reason),
        StandIn(cuda.random, "get_rng_state", get_state, reason),
        StandIn(cuda, "set_rng_state", set_state, reason),
        StandIn(cuda.random, "set_rng_state", set_state, reason),
        StandIn(cuda, "manual_seed", seed, reason),
        StandIn(cuda, "default_generators", lambda original: (torch.default_generator,), reason),
        StandIn(cuda, "_lazy_call", call_now, lazily),
        StandIn(cuda, "_lazy_init", _value(None), lazily),
    ]


def _on_cpu(device: Any) -> Any:
    """The CPU for anything that names a CUDA device (string, `torch.device` or index), else what was given."""
    if isinstance(device, bool):
        return device
    names_cuda = (
        isinstance(device, int)
        or (isinstance(device, str) and device.startswith("cuda"))
        or (isinstance(device, torch.device) and device.type == "cuda")
    )
    return _CPU if names_cuda else device


def _on_cpu_keyword(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return redirected


def _device_arguments() -> list[StandIn]:
    reason = "device='cuda', device=0 and pin_memory=True mean the CPU's ordinary memory"
    # Asked before anything is replaced: torch caches this set and looks functions up in it, as in `with device:`.
    constructors: set[Any] = torch_device_utils._device_constructors()
    names = sorted(name for name, value in vars(torch).items() if callable(value) and value in constructors)
    names += ["empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like", "randint_like"]
    methods = ["new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new_empty_strided"]
    return [StandIn(torch, name, _on_cpu_keyword, reason) for name in names] + [
        StandIn(torch.Tensor, name, _on_cpu_keyword, reason) for name in methods
    ]


def _tensor_methods() -> list[StandIn]:
    def stay(original: Any) -> Callable[..., torch.Tensor]:
        return lambda self, *args, **kwargs: self

    def to(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        redirected = _on_cpu_keyword(original)
        return lambda self, *args, **kwargs: redirected(self, *map(_on_cpu, args), **kwargs)

    def type_name(original: Callable[..., Any]) -> Callable[..., Any]:
        def name_or_cast(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

        return name_or_cast

    tensor = torch.Tensor
    return [
        StandIn(tensor, "cuda", stay, "moving to the device leaves the tensor where it is"),
        StandIn(tensor, "to", to, "moving to the device leaves the tensor where it is"),
        StandIn(tensor, "pin_memory", stay, "pinned memory needs CUDA"),
        StandIn(tensor, "record_stream", _value(None), "there are no streams to outlive"),
        StandIn(tensor, "type", type_name, "optimizers sort parameters by names such as torch.cuda.BFloat16Tensor"),
    ]
