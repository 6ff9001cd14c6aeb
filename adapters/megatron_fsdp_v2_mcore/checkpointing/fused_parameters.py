"""Which parameters of a Megatron model hold several matrices, by what its modules say about themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2.checkpoint.fused import FusedLayout, tensor_parallel_ranks

# With grouped experts there is one of each per local expert, numbered.
_PROJECTION = re.compile(r"(weight|bias)\d*")


def fused_layouts(model: nn.Module) -> dict[str, FusedLayout]:
    """The matrices in every fused parameter of a sharded model, by the parameter's name.

    Component names are what is appended to the parameter's name: `_w` and `_v` for gate and up projection, `.query` and
    the like for a gated delta net, as stock names them in its own checkpoints.
    """
    layouts = {}
    for path, module in model.named_modules():
        for name, layout in _layouts_of(module):
            layouts[f"{path}.{name}" if path else name] = layout
    return layouts


def _layouts_of(module: nn.Module) -> Iterator[tuple[str, FusedLayout]]:
    if isinstance(module, (MLP, TEGroupedMLP)) and module.config.gated_linear_unit:
        for name, parameter in module.linear_fc1.named_parameters(recurse=False):
            if _PROJECTION.fullmatch(name):
                assert isinstance(parameter, DTensor)
                rows = parameter.shape[0] // tensor_parallel_ranks(parameter) // 2
                yield f"linear_fc1.{name}", FusedLayout((("_w", rows), ("_v", rows)))
    elif hasattr(module, "in_proj_split_sections"):
        yield from _gated_delta_net(module)


def _gated_delta_net(module: Any) -> Iterator[tuple[str, FusedLayout]]:
    projections = zip(module.in_proj_split_names, module.in_proj_split_sections, strict=True)
    yield "in_proj.weight", FusedLayout(tuple((f".{name}", rows) for name, rows in projections))
    key, value = module.qk_dim_local_tp, module.v_dim_local_tp
    for name, _ in module.conv1d.named_parameters():
        yield f"conv1d.{name}", FusedLayout(((".query", key), (".key", key), (".value", value)))
