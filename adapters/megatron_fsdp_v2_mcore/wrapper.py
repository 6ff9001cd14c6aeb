"""The data-parallel wrapper that stock code sees in place of its own fully sharded one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp_v2 import FSDPModule, fully_shard

from .config import FSDPv2DDPConfig, mixed_precision_policy, wants_v2
from .gradient_checks import check_gradients
from .meta_device import provide_initializers
from .parallel import OUTER_AXIS, SHARD_AXIS, compute_device, model_group, model_meshes
from .units import find_units, output_layer

# Stock code takes a parameter's gradient shard from `_local_tensor` when it finds this attribute.
STOCK_MARK = "__fsdp_param__"


def dispatch_fully_sharded_data_parallel(cls: type) -> None:
    """Makes `cls(...)` build a `PluginFSDPv2` when its `ddp_config` asks for v2, and itself otherwise."""
    signature = inspect.signature(cls.__init__)

    def __new__(klass: type, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(None, *args, **kwargs).arguments
        chosen = PluginFSDPv2 if klass is cls and wants_v2(bound.get("ddp_config")) else klass
        return object.__new__(chosen)

    cls.__new__ = __new__  # type: ignore[method-assign, assignment]


class PluginFSDPv2(FullyShardedDataParallel):
    """Shards a Megatron model with `megatron_fsdp_v2` and gives it the methods of Megatron's training loop.

    A subclass of stock's wrapper for `isinstance` alone: nothing of its construction or machinery is used. `module` is
    what stock handed over (`Float16Module` or the model itself); the units are inside.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: FSDPv2DDPConfig,
        module: nn.Module,
        fsdp_unit_modules: list[type[nn.Module]] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: Any = None,
    ) -> None:
        """Takes stock's arguments. `disable_bucketing` means nothing here: a unit is never split or merged.

        Raises:
            ValueError: a unit name matches no module, or the process groups form no mesh.
            RuntimeError: a module was built on meta and can't be initialised.
        """
        _BaseDataParallel.__init__(self, config=config, module=module)
        self.ddp_config = ddp_config
        self.force_all_reduce = False
        self.device = device or compute_device()
        self.meshes = model_meshes(ddp_config, pg_collection, self.device)
        self.model_group = model_group(pg_collection)
        names = [f"{cls.__module__}.{cls.__qualname__}" for cls in fsdp_unit_modules or ()]
        self._root = self._shard(unwrap_model(module, (Float16Module,)), names or list(ddp_config.fsdp_unit_modules))
        # Without overlap nothing is reduced before the step, and stock doesn't mark its micro-batches either.
        self._deferral = ExitStack()
        if not ddp_config.overlap_grad_reduce:
            self._deferral.enter_context(self._root.no_sync())
        for parameter in self.parameters():
            setattr(parameter, STOCK_MARK, True)

    @property
    def root(self) -> FSDPModule:
        """The sharded model, without what Megatron wraps around it."""
        return self._root

    def _shard(self, model: nn.Module, unit_names: list[str]) -> FSDPModule:
        options: dict[str, Any] = {
            "mesh": self.meshes.data_parallel,
            "inner_sharding_fn": self.meshes.part,
            "mp_policy": mixed_precision_policy(self.ddp_config),
            "strategy": self.ddp_config.data_parallel_sharding_strategy,
            "outer_strategy": self.ddp_config.outer_dp_sharding_strategy,
            "grad_reduction": "sum" if self.config.calculate_per_token_loss else "average",
        }
        provide_initializers(model)
        last = output_layer(model)
        for unit in find_units(model, unit_names):
            # The backward starts where the forward ended, so the last unit's weights may stay.
            fully_shard(unit, reshard_after_forward=False if unit is last else None, **options)
        root: Any = fully_shard(model, **options)
        root.set_agreement_check(self.ddp_config.fsdp_check_ranks)
        return root

    # Gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches inside keep gradients that are partial until the step unreduced."""
        if not self.ddp_config.overlap_grad_reduce:
            yield
            return
        with self._root.no_sync():
            yield

    def start_grad_sync(self, *unused: Any) -> None:
        """Nothing to start: with `overlap_grad_reduce` units are reduced in the last backward, else at the finish."""

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Completes every reduction; each trainable parameter's `.grad` is final afterwards.

        `force_all_reduce` has no meaning here: it serves `--save-wgrads-interval`, which is refused.
        """
        # Stock gives parameters without a gradient one of zeros, which weight decay still acts on.
        self._root.finish_grad_sync(include_unused=True)
        check_gradients(self.ddp_config, dict(self.named_parameters()), self.model_group)

    def scale_gradients(self, scaling_factor: torch.Tensor | float) -> None:
        """Multiplies every gradient by a factor, a number or a 0-dim tensor."""
        self._root.scale_gradients(scaling_factor)

    def zero_grad_buffer(self) -> None:
        """Forgets all gradients. Stock calls it twice in a row before each step."""
        self._root.zero_grad()

    # Weights

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Starts gathering updated weights when they shall overlap; otherwise their first use gathers them."""
        if self.ddp_config.overlap_param_gather or force_sync or force_dispatch:
            self._root.start_weight_gather()

    def synchronize_param_gather(self) -> None:
        """Called after a pass without backward, at whose end every unit rests already."""

    def stop_communication(self) -> None:
        """Called before main weights are read. They are final whatever is being gathered or reduced."""

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Makes the replicas of every shard equal to those of the first rank of their axis."""
        for parameter in self.parameters():
            assert isinstance(parameter, DTensor)
            mesh = parameter.device_mesh
            for axis, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
                if axis in (OUTER_AXIS, SHARD_AXIS) and placement.is_replicate():
                    dist.broadcast(parameter.to_local(), group=mesh.get_group(axis), group_src=0)
        self._root.mark_weights_updated()

    def mark_weights_updated(self) -> None:
        """Tells the units that main weights were written, so that no copy made before is computed with."""
        self._root.mark_weights_updated()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Copies sharded values of the wrapped module's `state_dict()` back into it."""
        _BaseDataParallel.load_state_dict(self, state_dict, strict=strict)
        self.mark_weights_updated()
