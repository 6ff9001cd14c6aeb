"""A run that saved, stopped and resumed is the run that never stopped.

On as many ranks with the same strategy bit for bit in fp32, otherwise to 1e-5. `make test` runs some pairs of every
kind; the marker `full` adds all.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.functional.megatron import gated_delta_nets
from tests.functional.megatron.cases import Record
from tests.functional.megatron.checkpoint_runs import (
    MODEL,
    STOP,
    V2,
    ZERO_3,
    Ranks,
    Records,
    assert_continues,
    loading,
    saving,
    train,
    whole,
)

WORLDS = (1, 2, 3, 4)
USUAL_PAIRS = [(1, 1), (1, 4), (2, 2), (2, 3), (3, 3), (3, 1), (4, 4), (4, 2)]
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
USUAL_STRATEGIES = [
    ("no_shard", "optim_grads_params"),
    ("optim", "no_shard"),
    ("optim_grads", "optim"),
    ("optim_grads_params", "optim_grads"),
]
_TWO = "--num-distributed-optimizer-instances 2"
LAYOUTS = {
    "flat": ZERO_3,
    "hsdp": f"{ZERO_3} {_TWO}",
    "hfsdp": f"{ZERO_3} {_TWO} --outer-dp-sharding-strategy optim",
}


class Saved:
    """Every world's unbroken run and the checkpoint of one that stopped, and runs from there on other worlds."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self._ranks = ranks
        self._folder = folder
        self._unbroken: dict[int, Record] = {}
        self._resumed: dict[tuple[int, int], Record] = {}

    def unbroken(self, world: int) -> Record:
        if world not in self._unbroken:
            flags = f"{ZERO_3} {MODEL}"
            cases = [whole("unbroken", world, flags), saving("saving", world, self._folder / str(world), flags)]
            self._unbroken[world] = train(self._ranks, world, cases)["unbroken"]
        return self._unbroken[world]

    def resumed(self, wrote: int, reads: int, pairs: list[tuple[int, int]]) -> Record:
        """Runs all pairs that read on as many ranks at once."""
        if (wrote, reads) not in self._resumed:
            writers = [writer for writer, reader in pairs if reader == reads]
            for writer in writers:
                self.unbroken(writer)
            cases = [loading(str(n), reads, self._folder / str(n), f"{ZERO_3} {MODEL}") for n in writers]
            records = train(self._ranks, reads, cases)
            self._resumed |= {(writer, reads): records[str(writer)] for writer in writers}
        return self._resumed[wrote, reads]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(ranks, tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize(("wrote", "reads"), USUAL_PAIRS)
def test_any_number_of_ranks(saved: Saved, wrote: int, reads: int) -> None:
    resumed = saved.resumed(wrote, reads, USUAL_PAIRS)
    assert_continues(resumed, saved.unbroken(wrote), exact=wrote == reads)


OTHER_PAIRS = [pair for pair in product(WORLDS, WORLDS) if pair not in USUAL_PAIRS]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("wrote", "reads"), OTHER_PAIRS)
def test_any_number_of_ranks_in_every_pair(saved: Saved, wrote: int, reads: int) -> None:
    assert_continues(saved.resumed(wrote, reads, OTHER_PAIRS), saved.unbroken(wrote), exact=False)


def _strategies(ranks: Ranks, folder: Path, pairs: list[tuple[str, str]]) -> Records:
    writers = dict.fromkeys(writer for writer, _ in pairs)
    records = train(
        ranks,
        2,
        [
            *[whole(name, 2, f"{V2} {name} {MODEL}") for name in writers],
            *[saving(f"saving {name}", 2, folder / name, f"{V2} {name} {MODEL}") for name in writers],
        ],
    )
    loads = [loading(f"{writer} {reader}", 2, folder / writer, f"{V2} {reader} {MODEL}") for writer, reader in pairs]
    return records | train(ranks, 2, loads)


@pytest.fixture(scope="module")
def strategies(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return _strategies(ranks, tmp_path_factory.mktemp("strategies"), USUAL_STRATEGIES)


@pytest.mark.parametrize(("wrote", "reads"), USUAL_STRATEGIES)
def test_any_strategy(strategies: Records, wrote: str, reads: str) -> None:
    assert_continues(strategies[f"{wrote} {reads}"], strategies[wrote], exact=wrote == reads)


OTHER_STRATEGIES = [pair for pair in product(STRATEGIES, STRATEGIES) if pair not in USUAL_STRATEGIES]


@pytest.fixture(scope="module")
def every_strategy(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Records:
    return _strategies(ranks, tmp_path_factory.mktemp("every_strategy"), OTHER_STRATEGIES)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("wrote", "reads"), OTHER_STRATEGIES)
def test_any_strategy_in_every_pair(every_strategy: Records, wrote: str, reads: str) -> None:
    assert_continues(every_strategy[f"{wrote} {reads}"], every_strategy[wrote], exact=wrote == reads)


@pytest.fixture(scope="module")
def layouts(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Four ranks in two instances, to themselves and to a flat layout on three ranks; and back to two instances."""
    folder = tmp_path_factory.mktemp("layouts")
    two_axes = [name for name in LAYOUTS if name != "flat"]
    records = train(
        ranks,
        4,
        [
            *[whole(name, 4, f"{flags} {MODEL}") for name, flags in LAYOUTS.items()],
            *[saving(f"saving {name}", 4, folder / name, f"{flags} {MODEL}") for name, flags in LAYOUTS.items()],
        ],
    )
    records |= train(
        ranks,
        4,
        [
            *[loading(f"{name} {name}", 4, folder / name, f"{LAYOUTS[name]} {MODEL}") for name in two_axes],
            *[loading(f"flat {name}", 4, folder / "flat", f"{LAYOUTS[name]} {MODEL}") for name in two_axes],
        ],
    )
    flat = [loading(f"{name} flat", 3, folder / name, f"{ZERO_3} {MODEL}") for name in two_axes]
    return records | train(ranks, 3, flat)


@pytest.mark.parametrize(
    ("wrote", "reads"),
    [("hsdp", "hsdp"), ("hfsdp", "hfsdp"), ("flat", "hsdp"), ("flat", "hfsdp"), ("hsdp", "flat"), ("hfsdp", "flat")],
)
def test_any_layout(layouts: Records, wrote: str, reads: str) -> None:
    assert_continues(layouts[f"{wrote} {reads}"], layouts[wrote], exact=wrote == reads)


VARIANTS = {
    # Not hidden dropout: on the CPU it draws from the generator that a new data loader draws its seed from.
    "dropout": "--attention-dropout 0.1",
    "a seed per rank": "--attention-dropout 0.1 --data-parallel-random-init",
    "bf16": "--bf16",
    "fp16, dynamic scale": "--fp16 --initial-loss-scale 4096 --loss-scale-window 4",
    "sgd": "--optimizer sgd --lr 0.05 --min-lr 0.05",
    "experts": "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 24 --disable-bias-linear "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid",
    "mtp": "--mtp-num-layers 1",
    "untied": "--untie-embeddings-and-output-weights",
    "gated delta net": gated_delta_nets.FLAGS,
}
# Which of them resume on other ranks too. Random states belong to ranks, and so does what overflows in fp16.
TO_ANOTHER_WORLD = ("bf16", "sgd", "experts", "mtp", "gated delta net")


@pytest.fixture(scope="module")
def variants(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Records]:
    folder = tmp_path_factory.mktemp("variants")
    records: dict[str, Records] = {}
    for index, (variant, more) in enumerate(VARIANTS.items()):
        flags, place, run = f"{ZERO_3} {MODEL} {more}", folder / str(index), gated_delta_nets.run_of(variant)
        cases = [whole("unbroken", 2, flags), saving("saving", 2, place, flags), loading("resumed", 2, place, flags)]
        records[variant] = train(ranks, 2, cases, run)
        if variant in TO_ANOTHER_WORLD:
            records[variant] |= train(ranks, 3, [loading("on three", 3, place, flags)], run)
    return records


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_resume_exactly(variants: dict[str, Records], variant: str) -> None:
    records = variants[variant]
    assert_continues(records["resumed"], records["unbroken"], exact=True)
    assert records["resumed"].loss_scales == records["unbroken"].loss_scales[STOP:]


@pytest.mark.parametrize("variant", TO_ANOTHER_WORLD)
def test_variants_resume_on_other_ranks(variants: dict[str, Records], variant: str) -> None:
    tolerance = 5e-3 if variant == "bf16" else 1e-5
    assert_continues(variants[variant]["on three"], variants[variant]["unbroken"], exact=False, tolerance=tolerance)
