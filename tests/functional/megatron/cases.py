"""What the parity runs have in common: one small GPT, its flags, and the record a run leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

MICRO_BATCH_SIZE = 2
MICRO_BATCHES = 3
STEPS = 10
SEQUENCE_LENGTH = 16
VOCABULARY = 96

# The bias of the keys has no gradient but rounding, which Adam's usual epsilon would blow up to whole learning-rate
# steps: two stock runs with differently ordered sums then differ there by 1e-5. Hence the larger one.
_COMMON = f"""
--num-layers 2 --hidden-size 32 --ffn-hidden-size 72 --num-attention-heads 2 --position-embedding-type rope
--seq-length {SEQUENCE_LENGTH} --max-position-embeddings {SEQUENCE_LENGTH} --micro-batch-size {MICRO_BATCH_SIZE}
--train-iters {STEPS} --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 2
--weight-decay 0.1 --adam-eps 1e-6
--tokenizer-type NullTokenizer --vocab-size {VOCABULARY} --make-vocab-size-divisible-by 1 --mock-data
--num-workers 0 --seed 1234 --log-interval 1 --eval-interval 100 --eval-iters 1 --clip-grad 0.5
--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --distributed-backend gloo
--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --attention-backend unfused
""".split()


@dataclass(frozen=True)
class Case:
    """One training run. `flags` come on top of the common ones, so a flag given twice has the later value.

    `replica_ranks` is how many ranks work on the same samples, as tensor and context parallelism have it.
    `inspect(model, optimizer)` is called before the first step; what it returns stands in the record. A run that
    `stops` ends itself with `sys.exit`, as with `--exit-interval`.
    """

    name: str
    flags: tuple[str, ...] = ()
    inspect: Callable[[Any, Any], Any] | None = None
    stops: bool = False
    replica_ranks: int = 1

    def argv(self, world_size: int) -> list[str]:
        """The command line for `world_size` ranks, without the program's name."""
        batch = MICRO_BATCH_SIZE * MICRO_BATCHES * (world_size // self.replica_ranks)
        return [*_COMMON, "--global-batch-size", str(batch), *self.flags]


@dataclass
class Record:
    """What one run left behind, as seen by one rank. Lists hold one entry per optimizer step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    params_norms: list[float | None] = field(default_factory=list)
    zeros_in_grad: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    weights_checksum: float = 0.0
    wrapper: str = ""
    inspected: Any = None


def relative_differences(ours: list[float], theirs: list[float]) -> list[float]:
    """Step by step |ours - theirs| / |theirs|."""
    assert len(ours) == len(theirs), f"{len(ours)} entries against {len(theirs)}"
    return [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(ours, theirs, strict=True)]


def weight_differences(ours: Record, theirs: Record, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Per parameter the relative L2 norm of the difference of the final weights, both rounded to `dtype` first."""
    assert ours.weights.keys() == theirs.weights.keys(), ours.weights.keys() ^ theirs.weights.keys()
    differences = {}
    for name, reference in theirs.weights.items():
        assert ours.weights[name].shape == reference.shape, name
        distance = (ours.weights[name].to(dtype).double() - reference.to(dtype).double()).norm()
        differences[name] = float(distance / reference.double().norm().clamp_min(1e-30))
    return differences
