"""Runs stock `megatron.training.pretrain` many times in one process, on data and a loss of our own.

What a training script would do, without its file: command line, configuration, `pretrain`. Nothing of the
plug-in is called from here except its activation; a case chooses it with its flags alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils.data import Dataset

import megatron_fsdp_v2
from tests.functional.megatron.cases import SEQUENCE_LENGTH, VOCABULARY, Case, Record


class SyntheticText(Dataset[dict[str, torch.Tensor]]):
    """Token sequences with something to learn, and a loss mask that leaves each one a different token count."""

    def __init__(self, size: int, salt: int) -> None:
        self.size = size
        self.salt = salt

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(self.salt * 1_000_003 + index)
        start = torch.randint(VOCABULARY, (1,), generator=random)
        stride = torch.randint(1, 4, (SEQUENCE_LENGTH + 1,), generator=random)
        tokens = (start + stride.cumsum(0)) % VOCABULARY
        kept = torch.rand(SEQUENCE_LENGTH, generator=random) < torch.rand(1, generator=random).clamp_min(0.2)
        kept[0] = True
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": kept.float(),
            "position_ids": torch.arange(SEQUENCE_LENGTH),
        }


def _datasets(sizes: list[int], vp_stage: int | None = None) -> tuple[SyntheticText, ...]:
    return tuple(SyntheticText(max(size or 0, 1), salt) for salt, size in enumerate(sizes))


_datasets.is_distributed = True  # type: ignore[attr-defined]


def _loss(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    mask = loss_mask.view(-1)
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def _forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    cp_group = parallel_state.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(next(data), is_hybrid_cp=False, cp_group=cp_group)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def run_cases(rank: int, world_size: int, cases: list[Case]) -> dict[str, Record]:
    """Trains every case and returns their records by name. Weights are in rank 0's records only."""
    from megatron_fsdp_v2_mcore import cpu_emulation, register

    cpu_emulation.enable()
    register()
    return {case.name: _run_case(case, world_size) for case in cases}


def _run_case(case: Case, world_size: int) -> Record:
    record = Record()
    argv = ["parity", *case.argv(world_size)]
    ending = pytest.raises(SystemExit) if case.stops else contextlib.nullcontext()
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict(os.environ, _environment(case)),
        _fresh_megatron(),
        _recording(record, case),
        ending,
    ):
        train_from_command_line()
    return record


def _environment(case: Case) -> dict[str, str]:
    """Stock insists on this for tensor and context parallelism, on the architecture that the emulation names."""
    is_stock = "--use-megatron-fsdp-v2" not in case.flags
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_stock and case.replica_ranks > 1 else {}


def train_from_command_line() -> None:
    """What stands at the end of a stock training script."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, _datasets, ModelType.encoder_or_decoder, _forward_step)


@contextlib.contextmanager
def _recording(record: Record, case: Case) -> Iterator[None]:
    """Listens to the training loop at the places where it logs, and takes the model's weights at its end."""
    from megatron.training import training

    models: list[torch.nn.Module] = []
    setup, log, evaluate = training.setup_model_and_optimizer, training.training_log, training.evaluate

    def setup_and_keep(*args: Any, **kwargs: Any) -> Any:
        # Stock warms functions up on random input whose size depends on the parallelism; on the CPU that would show.
        torch.manual_seed(1234)
        result = setup(*args, **kwargs)
        models.extend(result[0])
        record.wrapper = type(result[0][0]).__name__
        if case.inspect is not None:
            record.inspected = case.inspect(result[0][0], result[1])
        return result

    def log_and_record(
        losses: dict,
        total: dict,
        lr: float,
        iteration: int,
        scale: float,
        memory: bool,
        skipped: int,
        norm: float | None,
        params_norm: float | None,
        zeros: float,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        if not skipped:
            record.losses.append(float(losses["lm loss"]))
            record.grad_norms.append(float(norm or 0.0))
        record.params_norms.append(None if params_norm is None else float(params_norm))
        record.zeros_in_grad.append(float(zeros or 0))
        record.skipped.append(skipped)
        record.loss_scales.append(float(scale))
        return log(losses, total, lr, iteration, scale, memory, skipped, norm, params_norm, zeros, *rest, **kwargs)

    def evaluate_and_record(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        record.evaluations.append(float(result[0]["lm loss"]))
        return result

    with (
        mock.patch.object(training, "setup_model_and_optimizer", setup_and_keep),
        mock.patch.object(training, "training_log", log_and_record),
        mock.patch.object(training, "evaluate", evaluate_and_record),
    ):
        yield
    record.weights = _weights(models[0]) if models else {}
    record.weights_checksum = sum(float(weight.double().sum()) for weight in record.weights.values())
    if dist.get_rank() != 0:
        record.weights = {}


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    weights = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            whole = megatron_fsdp_v2.full_tensor(parameter)
        else:
            whole = _whole_of_tensor_parallel(parameter)
        weights[name.replace("module.", "")] = whole.detach().float().clone()
    return weights


def _whole_of_tensor_parallel(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What stock's tensor-parallel ranks hold parts of."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return parameter
    parts = [torch.empty_like(parameter.data) for _ in range(group.size())]
    dist.all_gather(parts, parameter.data, group=group)
    return torch.cat(parts, dim=parameter.partition_dim)  # type: ignore[attr-defined]


@contextlib.contextmanager
def _fresh_megatron() -> Iterator[None]:
    """Forgets everything that stock keeps in module globals, so that the next run starts like a new process."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training.global_vars import destroy_global_vars

    try:
        yield
    finally:
        destroy_global_vars()
        destroy_num_microbatches_calculator()
        destroy_rerun_state_machine()
        parallel_state.destroy_model_parallel()
        # torch answers for equal meshes from its cache, with the mesh of an earlier run.
        _clear_sharding_prop_cache()
