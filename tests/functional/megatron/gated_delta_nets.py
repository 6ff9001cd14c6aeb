"""Stock's GatedDeltaNet on the CPU: its own torch rule, and stand-ins for what else needs a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from tests.functional.megatron.cases import Case, Record
from tests.functional.megatron.checkpoint_runs import Run
from tests.functional.megatron.driver import run_cases

# One gated delta net and one usual attention.
FLAGS = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --deterministic-mode "
    "--linear-key-head-dim 8 --linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4 "
    "--swiglu --normalization RMSNorm --disable-bias-linear"
)


def run_of(variant: str) -> Run:
    """What runs the cases of a variant."""
    return run_with_gated_delta_nets if variant == "gated delta net" else run_cases


def run_with_gated_delta_nets(rank: int, world_size: int, cases: list[Case]) -> dict[str, Record]:
    """`run_cases` where stock can build and run gated delta nets."""
    from megatron_fsdp_v2_mcore import cpu_emulation

    cpu_emulation.enable()
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import common

    class LocalProvider(LocalSpecProvider):
        def column_parallel_layer_norm_linear(self) -> Any:
            return self.column_parallel_linear()

    def local_attention(config: Any, backend: Any = None) -> Any:
        attention = get_gpt_layer_local_spec(normalization=config.normalization).submodules.self_attention
        attention.metainfo["fuse_input_layernorm"] = False
        return attention

    with (
        mock.patch.object(common, "HAVE_FLA", True),
        mock.patch.object(common, "l2norm", _l2norm),
        mock.patch.object(specs, "_get_backend_spec_provider", return_value=LocalProvider()),
        mock.patch.object(specs, "_get_self_attention_module_spec", local_attention),
    ):
        return run_cases(rank, world_size, cases)


def _l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(dim, keepdim=True) + eps)
