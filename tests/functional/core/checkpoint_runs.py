"""What ranks do in tests of saves and loads at other numbers of ranks, and what one process says about the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import full_tensor, fully_shard, load_checkpoint, save_checkpoint
from tests.functional.core.cases_dtensor import Bag, sharded_bag
from tests.functional.core.cases_support import ZERO_3, Net, own_rows, shard_net

SHAPES = ((5, 3), (5,), (2, 3), (1,), (0, 4), (14, 4))
MOMENTS = {"exp_avg": 1000, "exp_avg_sq": 2000}
STEPS = 2


def integers(model: nn.Module) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The name, position and integers of every parameter of a bag."""
    plain = Bag(shapes=SHAPES)
    for index, ((name, _), whole) in enumerate(zip(model.named_parameters(), plain.parameters(), strict=True)):
        yield name, index, whole.detach()


def save_integers(rank: int, world: int, folder: str, layouts: list[str]) -> None:
    """Saves bags of integers whose moments are integers, too, each in a folder named like its layout."""
    for layout in layouts:
        bag = sharded_bag(layout, shapes=SHAPES)
        optimizer = torch.optim.AdamW(bag.parameters(), lr=0.5, betas=(0.5, 0.75))
        bag(torch.ones(())).backward()
        optimizer.step()
        parameters = list(bag.parameters())
        with torch.no_grad():
            for _, index, whole in integers(bag):
                parameter = parameters[index]
                fill(parameter, whole)
                for key, start in MOMENTS.items():
                    fill(optimizer.state[parameter][key], whole + start)
        save_checkpoint(bag, optimizer, place(folder, world, layout), extra={"world": world})


def check_integers(rank: int, world: int, folder: str, saved: list[tuple[int, str]], layout: str) -> None:
    """Loads what bags of any numbers of ranks and layouts saved, before any step."""
    for writers, written in saved:
        bag = sharded_bag(layout, shapes=SHAPES, start=5000)
        optimizer = torch.optim.AdamW(bag.parameters())
        assert load_checkpoint(bag, optimizer, place(folder, writers, written)) == {"world": writers}
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
        parameters = list(bag.parameters())
        for name, index, whole in integers(bag):
            parameter, what = parameters[index], f"{name} of {writers} ranks, {written}"
            same(parameter, whole, what)
            state = optimizer.state[parameter]
            assert state["step"].item() == 1, what
            for key, start in MOMENTS.items():
                assert state[key].placements == parameter.placements
                same(state[key], whole + start, f"{key} of {what}")


def check_files(path: Path) -> None:
    """One process finds every integer by plain DCP, in chunks that tile each tensor once; nothing empty was written."""
    expected = {f"model.{name}": whole for name, _, whole in integers(Bag(shapes=SHAPES))}
    for name, _, whole in integers(Bag(shapes=SHAPES)):
        expected |= {f"optimizer.state.{name}.{key}": whole + start for key, start in MOMENTS.items()}
    loaded = {key: torch.full_like(whole, -1) for key, whole in expected.items()}
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    for key, whole in expected.items():
        assert torch.equal(loaded[key], whole), key
        entry = entries[key]
        assert isinstance(entry, TensorStorageMetadata)
        held = torch.zeros(whole.shape)
        for chunk in entry.chunks:
            assert whole.numel() == 0 or chunk.sizes.numel(), f"{key} has an empty chunk"
            held[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))] += 1
        assert (held == 1).all(), f"{key}: {entry.chunks}"


def place(folder: str, world: int, name: str) -> Path:
    """Where a test keeps the checkpoint ``name`` of ``world`` ranks."""
    return Path(folder) / f"{name.replace('/', '_')}_{world}"


def fill(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Writes this rank's rows of ``whole``."""
    held, rows = own_rows(tensor, whole)
    held.copy_(rows)


def same(ours: torch.Tensor, whole: torch.Tensor, what: str) -> None:
    """A tensor is ``whole`` once it's gathered."""
    gathered = full_tensor(ours).detach()
    assert torch.equal(gathered, whole), f"{what}: {gathered} beside {whole}"


class Skipping(torch.optim.AdamW):
    """An optimizer that passes over empty shards, as fused ones do: it has no state for them."""

    def __init__(self, params: Any, **options: Any) -> None:
        parameters = list(params)
        super().__init__(parameters, **options)

    def step(self, closure: Any = None) -> Any:
        """As AdamW's."""
        hidden = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and isinstance(parameter, DTensor) and parameter.to_local().numel() == 0:
                    hidden[parameter], parameter.grad = parameter.grad, None
        super().step(closure)
        for parameter, gradient in hidden.items():
            parameter.grad = gradient


class GroupSteps(torch.optim.Optimizer):
    """Adam that counts steps in its groups, and keeps a plain number beside its moments."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(exp_avg=torch.zeros_like(parameter), updates=0)
                state["updates"] += 1
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                parameter.sub_(state["exp_avg"] * (group["lr"] / (1 - 0.9 ** group["step"]) / state["updates"]))


def three_rows() -> nn.Module:
    """A weight of (3, 4)."""
    return nn.Linear(4, 3, bias=False)


def one_row() -> nn.Module:
    """A weight of (1, 4): with several ranks all but one have nothing."""
    return nn.Linear(4, 1, bias=False)


MODELS: dict[str, Callable[[], Any]] = {"net": Net, "three": three_rows, "one": one_row}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, betas=(0.9, 0.999), weight_decay=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "skipping": lambda params: Skipping(params, lr=0.1),
    "group steps": lambda params: GroupSteps(params, lr=0.1),
}


def data_of(model: str, step: int) -> torch.Tensor:
    """The batch of a step, the same on every rank."""
    return torch.linspace(-1, 1 + step, 20).view(4, 5)[:, : 5 if model == "net" else 4]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, steps: range) -> None:
    """Some steps."""
    for step in steps:
        optimizer.zero_grad()
        model(data_of(name, step)).square().mean().backward()
        optimizer.step()


def reference(model: str, optimizer: str) -> list[torch.Tensor]:
    """Weights of the run that never stopped, by plain torch in this process."""
    torch.manual_seed(0)
    plain = MODELS[model]()
    train(plain, OPTIMIZERS[optimizer](plain.parameters()), model, range(2 * STEPS))
    return [parameter.detach() for parameter in plain.parameters()]


def sharded(model: str, strategy: str = ZERO_3) -> nn.Module:
    """A model of `MODELS` on all ranks."""
    module = MODELS[model]()
    if model == "net":
        shard_net(strategy)(module)
        return module
    return fully_shard(module, strategy=strategy)


def save_run(rank: int, world: int, folder: str, runs: list[tuple[str, str]]) -> None:
    """Trains the first half of each run and saves it."""
    for name, kind in runs:
        torch.manual_seed(0)
        model = sharded(name)
        optimizer = OPTIMIZERS[kind](model.parameters())
        train(model, optimizer, name, range(STEPS))
        save_checkpoint(model, optimizer, place(folder, world, f"{name} {kind}"))


def resume_run(
    rank: int, world: int, folder: str, writers: int, runs: list[tuple[str, str]]
) -> list[list[torch.Tensor]]:
    """Loads each into a fresh model before any step, trains the second half, and returns the weights, whole."""
    results = []
    for name, kind in runs:
        torch.manual_seed(100 + rank)
        model = sharded(name)
        optimizer = OPTIMIZERS[kind](model.parameters())
        load_checkpoint(model, optimizer, place(folder, writers, f"{name} {kind}"))
        train(model, optimizer, name, range(STEPS, 2 * STEPS))
        results.append([full_tensor(parameter).detach() for parameter in model.parameters()])
    return results
