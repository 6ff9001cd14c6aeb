"""Cases: saves and loads that can't succeed: every rank says the same, and names what is still intact."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from megatron_fsdp_v2 import CheckpointError, full_tensor, fully_shard, load_checkpoint, save_checkpoint
from megatron_fsdp_v2.checkpoint.fused import FusedLayout
from megatron_fsdp_v2.checkpoint.storage import is_complete
from tests.functional.core.cases_checkpoint import sharded_net, trained, wholes
from tests.functional.core.cases_dtensor import shared_folder
from tests.functional.core.cases_support import Net, Ranks, adamw, case, refused


@contextmanager
def refused_alike(*words: str) -> Iterator[None]:
    """Every rank has to raise a CheckpointError of the same text, with all words in it."""
    try:
        yield
    except CheckpointError as error:
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(error))
        assert len(set(texts)) == 1, texts
        missing = [word for word in words if word not in texts[0]]
        assert not missing, f"{missing} not in {texts[0]}"
    else:
        raise AssertionError("no CheckpointError was raised")


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder, with its time of change and content."""
    return {
        str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@case(worlds=(2, 3, 4))
def a_key_that_one_rank_lacks(ranks: Ranks) -> None:
    """The error names it and the rank, nobody waits, and the checkpoint before is where it was (R01)."""
    net = sharded_net()
    optimizer = trained(net)
    with shared_folder(ranks) as folder:
        save_checkpoint(net, optimizer, folder / "c")
        dist.barrier()
        before = files_of(folder)
        names: list[Any] = [next(name for name, parameter in net.named_parameters() if parameter.to_local().numel())]
        dist.broadcast_object_list(names, src=1)
        (name,) = names
        if ranks.rank == 1:
            del optimizer.state[net.get_parameter(name)]["exp_avg_sq"]
        with refused_alike(f"optimizer.state.{name}.exp_avg_sq", "missing on rank 1", "1 keys differ"):
            save_checkpoint(net, optimizer, folder / "c")
        extra = {"step": 1, **({"mine": 2} if ranks.rank == 0 else {})}
        with refused_alike("extra.mine", "object on rank 0"):
            save_checkpoint(net, None, folder / "c", extra=extra)
        with refused_alike("extra.t: float32 [2] on rank 0", "float32 [3] on rank"):
            save_checkpoint(net, None, folder / "c", extra={"t": torch.zeros(2 if ranks.rank == 0 else 3)})
        dist.barrier()
        assert files_of(folder) == before


@case(worlds=(2, 3))
def what_cant_be_saved_on_one_rank(ranks: Ranks) -> None:
    net = sharded_net()
    value = Net() if ranks.rank == 1 else 1
    with shared_folder(ranks) as folder, refused_alike("rank 1", "extra.list", "tests.functional", "add_safe_globals"):
        save_checkpoint(net, None, folder / "c", extra={"list": [value.__class__]})


class Other(nn.Module):
    """Like a Net whose head has other rows, with a parameter more and one less."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.layers, self.head = net.layers, nn.Linear(5, 4)
        self.new = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * self.new


@case(worlds=(1, 3))
def another_model(ranks: Ranks) -> None:
    """All differences are listed, and nothing is changed: no weight, no state, no option."""
    net = sharded_net()
    other = fully_shard(Other())
    optimizer = adamw(other.parameters())
    before = wholes(other.state_dict())
    with shared_folder(ranks) as folder:
        save_checkpoint(net, trained(net), folder / "c")
        kept = files_of(folder)
        words = ("model.new", "model.scale", "model.head.weight: (3, 5) in the checkpoint, (4, 5) here", str(folder))
        for strict in (True, False):
            with refused_alike(*words, "optimizer.state.scale.exp_avg"):
                load_checkpoint(other, optimizer, folder / "c", strict=strict)
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == 1e-2
        for name, value in wholes(other.state_dict()).items():
            assert torch.equal(value, before[name])
        assert files_of(folder) == kept


@case(worlds=(1, 2))
def what_both_have(ranks: Ranks) -> None:
    """Not strict: what is missing keeps its values, the warning lists it; strict: an error with the remedy."""
    net = sharded_net()
    other = Other()
    other.head = nn.Linear(5, 3)
    fully_shard(other)
    loaded = trained_apart(other)
    with shared_folder(ranks) as folder:
        save_checkpoint(net, trained(net), folder / "c", extra={"step": 3})
        with refused_alike("model.new", "strict=False"):
            load_checkpoint(other, None, folder / "c")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert load_checkpoint(other, loaded, folder / "c", strict=False) == {"step": 3}
        if ranks.rank == 0:
            assert any("model.new" in str(one.message) and "model.scale" in str(one.message) for one in said)
        save_checkpoint(net, None, folder / "weights")
        with refused_alike("optimizer.param_groups", "no optimizer"):
            load_checkpoint(net, adamw(net.parameters()), folder / "weights")
        assert load_checkpoint(net, None, folder / "weights") == {}
    assert (full_tensor(other.new) == 0.5).all()
    assert torch.equal(full_tensor(other.head.weight), full_tensor(net.head.weight))


def trained_apart(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer without state for one parameter."""
    return adamw(list(model.parameters())[1:])


@case(worlds=(1, 2))
def checkpoints_that_arent_whole(ranks: Ranks) -> None:
    net = sharded_net()
    optimizer = trained(net)
    before = wholes(net.state_dict())
    with shared_folder(ranks) as folder:
        with refused_alike(str(folder / "none"), "not a folder"):
            load_checkpoint(net, optimizer, folder / "none")
        for name, damage in (("missing", Path.unlink), ("bytes of", lambda file: os.truncate(file, 10))):
            save_checkpoint(net, optimizer, folder / name)
            dist.barrier()
            if ranks.rank == 0:
                damage(folder / name / "__0_0.distcp")
            dist.barrier()
            with refused_alike(str(folder / name / "__0_0.distcp"), name):
                load_checkpoint(net, optimizer, folder / name)
        save_checkpoint(net, optimizer, folder / "scrambled")
        dist.barrier()
        if ranks.rank == 0:
            file = folder / "scrambled" / "__0_0.distcp"
            file.write_bytes(bytes(file.stat().st_size))
        dist.barrier()
        with refused_alike(str(folder / "scrambled")):
            load_checkpoint(net, optimizer, folder / "scrambled")
    for name, value in wholes(net.state_dict()).items():
        assert torch.equal(value, before[name])


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.file}",)


@case(worlds=(1, 2))
def nothing_in_a_checkpoint_is_run(ranks: Ranks) -> None:
    """Wherever there is an object: options, extra state, optimizer state."""
    net = nn.Linear(2, 2)
    with shared_folder(ranks) as folder:
        trap = folder / "sprung"
        for index, key in enumerate(("optimizer.param_groups", "extra.step", "optimizer.state.weight.count")):
            model = {f"model.{name}": value for name, value in net.state_dict().items()}
            state = {"optimizer.param_groups": '[{"lr": 1}]', **model, key: Trap(trap)}
            path = folder / str(index)
            dcp.save(state, checkpoint_id=path)
            with refused_alike(key, "without running code", "system"):
                load_checkpoint(net, torch.optim.SGD(net.parameters()), path)
        assert not trap.exists()


@case(worlds=(1, 2))
def a_full_disk(ranks: Ranks) -> None:
    """The error names the file and what is intact; once there is room again, the next save succeeds."""
    torch.manual_seed(ranks.rank)
    model = fully_shard(nn.Linear(64, 640))
    with shared_folder(ranks) as folder:
        save_checkpoint(model, None, folder / "c", extra={"step": 1})
        last = ranks.world - 1
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if ranks.rank == last:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        with refused_alike(f"__{last}_0.distcp", f"rank {last}", "is whole", "c.replaced"):
            save_checkpoint(model, None, folder / "c", extra={"step": 2})
        with refused_alike(f"__{last}_0.distcp", "no whole checkpoint at this path"):
            save_checkpoint(model, None, folder / "new", extra={"step": 2})
        if ranks.rank == last:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        dist.barrier()
        assert not is_complete(folder / "c")
        assert load_checkpoint(model, None, folder / "c") == {"step": 1}
        save_checkpoint(model, None, folder / "c", extra={"step": 3})
        assert load_checkpoint(model, None, folder / "c") == {"step": 3}


@case(worlds=(2,))
def wrong_arguments(ranks: Ranks) -> None:
    """Refused where they are passed, on a single rank too: nothing is sent before."""
    if ranks.rank == 1:
        return
    net = sharded_net()
    optimizer = adamw(net.parameters())
    path = "/nonexistent/never/written"
    layout = FusedLayout((("a", 3), ("b", 4)))
    with torch.device("meta"):
        meta = nn.Linear(2, 2)
    wrong: list[tuple[type[Exception], tuple[str, ...], Any, Any, dict[str, Any]]] = [
        (TypeError, ("model", "dict"), {}, None, {}),
        (TypeError, ("optimizer", "str"), net, "adam", {}),
        (ValueError, ("not in the model",), nn.Linear(2, 2), optimizer, {}),
        (ValueError, ("several optimizers",), net, [optimizer, adamw(net.parameters())], {}),
        (ValueError, ("weight", "meta"), meta, None, {}),
        (TypeError, ("extra", "list"), net, None, {"extra": [1]}),
        (TypeError, ("extra", "3"), net, None, {"extra": {3: 1}}),
        (TypeError, ("fused", "tuple"), net, None, {"fused": {"scale": (1, 2)}}),
        (ValueError, ("'missing'",), net, None, {"fused": {"missing": layout}}),
        (ValueError, ("7 rows",), net, None, {"fused": {"scale": layout}}),
    ]
    for kind, words, model, made, options in wrong:
        for call in (save_checkpoint, load_checkpoint):
            with refused(kind, *words):
                call(model, made, path, **options)
    with refused(TypeError, "strict"):
        load_checkpoint(net, None, path, strict="yes")  # type: ignore[arg-type]
