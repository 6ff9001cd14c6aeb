"""A stock Megatron training script of its own: no plug-in, no emulation, stock flags only.

Trains on arithmetic progressions, so that no files are needed. At the end each rank prints one line that says what it
was started with: `sys.argv[1:]`, `sys.path[0]` and the class that wrapped the model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

Batch = dict[str, torch.Tensor]
WRAPPERS: set[str] = set()


class Progressions(torch.utils.data.Dataset[Batch]):
    """Sequences a, a + d, a + 2d, ... modulo the vocabulary; (sequence,) int64 tensors."""

    def __init__(self, size: int, length: int, vocabulary: int) -> None:
        self.size, self.length, self.vocabulary = size, length, vocabulary

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        positions = torch.arange(self.length + 1)
        tokens = (index + (index % 3 + 1) * positions) % self.vocabulary
        return {"tokens": tokens[:-1], "labels": tokens[1:], "position_ids": positions[:-1]}


def datasets(sizes: list[int], vp_stage: int | None = None) -> tuple[Progressions, ...]:
    args = get_args()
    return tuple(Progressions(size or 1, args.seq_length, args.vocab_size) for size in sizes)


datasets.is_distributed = True  # type: ignore[attr-defined]


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total = losses.float().sum()
    count = torch.tensor(losses.numel(), dtype=torch.int, device="cuda")
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items()}
    WRAPPERS.add(type(model).__name__)
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), mean_loss


if __name__ == "__main__":
    arguments = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
    report = {"argv": sys.argv[1:], "path": sys.path[0], "wrappers": sorted(WRAPPERS)}
    print("STARTED WITH", json.dumps(report), flush=True)
