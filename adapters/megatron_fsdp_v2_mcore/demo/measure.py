"""Run a training script on this rank and note what its state weighs and how often it communicates.

    torchrun ... -m megatron_fsdp_v2_mcore.demo.measure FOLDER SCRIPT FLAGS...

The script and the training loop stay as they are. Two functions of the loop are wrapped to see the model, the
optimizer and the steps, and the methods of ``ProcessGroup`` count their calls. Each rank writes one JSON file.
"""

import functools
import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp_v2.module import units_below

from .. import bootstrap
from ..datasets import wrap_compile_helpers

# Every name that some supported torch gives to a collective of ProcessGroup.
COLLECTIVES = {
    "allreduce": "all-reduce",
    "allreduce_coalesced": "all-reduce",
    "allgather": "all-gather",
    "_allgather_base": "all-gather",
    "all_gather_single": "all-gather",
    "allgather_coalesced": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "all_gather_single_coalesced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "_reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "reduce_scatter_single_coalesced": "reduce-scatter",
    "broadcast": "broadcast",
    "alltoall": "all-to-all",
    "alltoall_base": "all-to-all",
    "all_to_all_single": "all-to-all",
    "reduce": "other",
    "gather": "other",
    "scatter": "other",
    "send": "send/receive",
    "recv": "send/receive",
    "recv_anysource": "send/receive",
    "barrier": "barrier",
}


class CollectiveCounter:
    """Counts the collectives that this process issues over groups of more than one rank.

    Calls that are coalesced count as one, under the kind of the first. Not seen: functional collectives
    (``torch.distributed._functional_collectives``), which don't pass through these methods.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._coalescing: dict[int, list[str]] = {}

    def install(self, group_class: type) -> None:
        """Wrap the methods of ``group_class``; they stay wrapped until the process ends."""
        for name, kind in COLLECTIVES.items():
            if hasattr(group_class, name):
                setattr(group_class, name, self._counted(getattr(group_class, name), kind))
        for name, wrap in (("_start_coalescing", self._opened), ("_end_coalescing", self._closed)):
            setattr(group_class, name, wrap(getattr(group_class, name)))

    def _counted(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if id(group) in self._coalescing:
                self._coalescing[id(group)].append(kind)
            elif group.size() > 1:
                self.counts[kind] += 1
            return method(group, *args, **kwargs)

        return call

    def _opened(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._coalescing[id(group)] = []
            return method(group, *args, **kwargs)

        return call

    def _closed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            kinds = self._coalescing.pop(id(group))
            if kinds and group.size() > 1:
                self.counts[kinds[0]] += 1
            return method(group, *args, **kwargs)

        return call


@dataclass
class RankMeasure:
    """What one rank measured. Bytes are those of the tensors' storages, padding included, between two steps."""

    parameters: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    plain_weight_bytes: int = 0
    plain_gradient_bytes: int = 0
    plain_optimizer_bytes: int | None = None
    steps: int = 0
    collectives_per_step: dict[str, int] = field(default_factory=dict)


class Recorder:
    """Sees the training loop's model, optimizer and steps."""

    def __init__(self) -> None:
        self.counter = CollectiveCounter()
        self.model: list[torch.nn.Module] = []
        self.optimizer: Any = None
        self.steps: list[Counter[str]] = []

    def install(self, training: Any, counted_group: type = torch.distributed.ProcessGroup) -> None:
        """Wrap the two functions of ``megatron.training.training`` that its loop looks up by name."""
        self.counter.install(counted_group)
        set_up, step = training.setup_model_and_optimizer, training.train_step

        @functools.wraps(set_up)
        def noted_set_up(*args: Any, **kwargs: Any) -> Any:
            result = set_up(*args, **kwargs)
            self.model, self.optimizer = result[0], result[1]
            return result

        @functools.wraps(step)
        def counted_step(*args: Any, **kwargs: Any) -> Any:
            before = self.counter.counts.copy()
            result = step(*args, **kwargs)
            self.steps.append(self.counter.counts - before)
            return result

        training.setup_model_and_optimizer, training.train_step = noted_set_up, counted_step

    def measure(self, args: Any) -> RankMeasure:
        """Weigh what is alive now; ``args`` is stock's namespace, which says how plain data parallel would hold it."""
        parameters = [parameter for chunk in self.model for parameter in chunk.parameters()]
        weights = storages(computed_with(self.model, parameters))
        gradients = storages(gradient for parameter in parameters for gradient in gradients_of(parameter))
        states = storages(optimizer_tensors(self.optimizer))
        count = sum(parameter.numel() for parameter in parameters)
        plain = plain_bytes(count, args)
        return RankMeasure(
            parameters=count,
            weight_bytes=sum(weights.values()),
            gradient_bytes=total_besides(gradients, weights),
            optimizer_bytes=total_besides(states, weights | gradients),
            plain_weight_bytes=plain[0],
            plain_gradient_bytes=plain[1],
            plain_optimizer_bytes=plain[2],
            steps=len(self.steps),
            collectives_per_step=dict(self.steps[-1]) if self.steps else {},
        )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage below ``tensors``, by its address. Views of one buffer count once."""
    found = (local(tensor).untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def total_besides(mine: dict[int, int], counted: dict[int, int]) -> int:
    """Bytes of the storages in ``mine`` that ``counted`` doesn't hold already."""
    return sum(size for address, size in mine.items() if address not in counted)


def computed_with(model: list[torch.nn.Module], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """The weights that forward reads. A sharded model shows its main weights as parameters, which may be others."""
    buffers = [group.compute for chunk in model for unit in units_below(chunk) for group in unit.groups]
    return [piece for buffer in buffers for piece in buffer.pieces] or parameters


def gradients_of(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The gradients that a parameter holds, under torch's name and under Megatron's."""
    held = (parameter.grad, getattr(parameter, "main_grad", None))
    return [gradient for gradient in held if isinstance(gradient, torch.Tensor)]


def optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """States and main weights of a Megatron optimizer, chained or not."""
    tensors: list[torch.Tensor] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        tensors += [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
    return tensors


def plain_bytes(parameters: int, args: Any) -> tuple[int, int, int | None]:
    """(weight, gradient, optimizer) bytes of plain data parallel, computed: every rank holds everything.

    Optimizer bytes hold fp32 main weights where the weights are of lower precision; None for an optimizer other
    than Adam and SGD.
    """
    width = args.params_dtype.itemsize
    moments = {"adam": 8, "sgd": 4}.get(args.optimizer)
    main_weights = 4 if width < 4 else 0
    gradient_width = 4 if args.accumulate_allreduce_grads_in_fp32 else width
    optimizer = None if moments is None else parameters * (moments + main_weights)
    return parameters * width, parameters * gradient_width, optimizer


def main() -> None:
    """Run the script that the command line names; write ``rankN.json`` when it has ended well."""
    folder, script = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    bootstrap.activate()
    from megatron.core.datasets import utils
    from megatron.training import training

    # Without v2 and without emulation nothing else does this, and the loop of the pip package stops here.
    utils.compile_helpers = wrap_compile_helpers(utils.compile_helpers)
    recorder = Recorder()
    recorder.install(training)
    runpy.run_path(script, run_name="__main__")
    folder.mkdir(exist_ok=True)
    measure = recorder.measure(training.get_args())
    rank = torch.distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(asdict(measure)))
    # Python shutting down beside gloo's threads was seen to abort ("terminate called without an active exception"),
    # and a finished run then counts as failed. Nothing is left to do, so end without the shutdown.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
