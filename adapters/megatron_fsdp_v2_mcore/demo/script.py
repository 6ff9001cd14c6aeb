"""Train a GPT with the stock, pip-installed Megatron training loop.

A plain stock script: it takes stock's flags, builds everything from installed parts, and knows nothing of how the
data-parallel ranks share the model::

    torchrun --nproc-per-node 2 script.py --train-data-path PREFIX --num-layers 4 ...
"""

import time
from collections.abc import Iterator
from functools import partial

PROGRAM_START = time.time()

import torch  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: E402
from megatron.training import get_args, pretrain, set_startup_timestamps  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.utils import get_blend_and_blend_per_split  # noqa: E402

Batch = dict[str, torch.Tensor]
Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def token_loss(mask: torch.Tensor, losses: torch.Tensor) -> Loss:
    """Summed loss of a micro-batch, its token count (int), and the pair of both that stock logs.

    ``losses`` and ``mask`` have shape (micro-batch, sequence).
    """
    mask = mask.view(-1).float()
    total = (losses.view(-1).float() * mask).sum()
    count = mask.sum().detach().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[torch.Tensor, partial[Loss]]:
    """One micro-batch through ``model``: its output and the function that turns it into a loss."""
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(batches).items()}
    output = model(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"])
    return output, partial(token_loss, batch["loss_mask"])


def build_datasets(sample_counts: list[int]) -> tuple[GPTDataset | None, ...]:
    """(train, validation, test) datasets for the number of samples that each is asked for."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return tuple(BlendedMegatronDatasetBuilder(GPTDataset, sample_counts, lambda: True, config).build())


build_datasets.is_distributed = True  # every rank reads its own batches


def main() -> None:
    """Parse stock's flags and train."""
    set_startup_timestamps(program_start=PROGRAM_START, main_entry=time.time())
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
