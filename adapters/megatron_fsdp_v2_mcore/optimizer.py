"""The optimizer that stock code sees in place of its distributed one: it steps the main weights in their shards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch import nn

from megatron_fsdp_v2.checkpoint.optimizer_state import SavedState

from .checkpointing.optimizer_entry import GROUPS, SCALER, create_missing_state, optimizer_entry, restore_groups
from .config import wants_v2
from .gradient_checks import local_gradient

if TYPE_CHECKING:
    from .wrapper import PluginFSDPv2

# Stock's guard against dividing by a zero norm.
_NORM_EPSILON = 1e-6


def dispatch_distributed_optimizer(cls: type) -> None:
    """Makes `cls(...)` build an `FSDPv2DistributedOptimizer` for chunks wrapped by v2, and itself otherwise."""
    signature = inspect.signature(cls.__init__)

    def __new__(klass: type, *args: Any, **kwargs: Any) -> Any:
        chunks = signature.bind_partial(None, *args, **kwargs).arguments.get("model_chunks") or [None]
        chosen = FSDPv2DistributedOptimizer if klass is cls and wants_v2(_ddp_config(chunks[0])) else klass
        return object.__new__(chosen)

    cls.__new__ = __new__  # type: ignore[method-assign, assignment]


def _ddp_config(chunk: Any) -> Any:
    return getattr(chunk, "ddp_config", None)


class FSDPv2DistributedOptimizer(DistributedOptimizer):
    """Steps DTensor parameters, whose shards are the main weights. Nothing is copied between weights here.

    A subclass of stock's optimizer for `isinstance` and for the methods that only look at parameters; its buffers and
    ranges don't exist.
    """

    model_chunks: list[PluginFSDPv2]

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Any,
        model_chunks: list[PluginFSDPv2],
        per_model_buffers: Any = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        data_parallel_group_gloo: dist.ProcessGroup | None = None,
        data_parallel_group_idx: int | None = None,
        distributed_optimizer_instance_id: int = 0,
    ) -> None:
        """Takes stock's arguments; `per_model_buffers` and the groups belong to buffers that don't exist here."""
        MixedPrecisionOptimizer.__init__(self, optimizer, config, grad_scaler, init_state_fn)
        self.model_chunks = model_chunks
        self.ddp_config = model_chunks[0].ddp_config
        self.distributed_optimizer_instance_id = distributed_optimizer_instance_id
        self.is_stub_optimizer = optimizer is None

    def get_grad_stats_parallel_group(self) -> dist.ProcessGroup:
        """The ranks whose gradient shards together are every gradient exactly once."""
        if self.ddp_config.outer_dp_sharding_strategy == "optim":
            return self.model_chunks[0].model_group
        return super().get_grad_stats_parallel_group()

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        """Local gradient shards in fp32, without the empty ones, which fused kernels can't take."""
        return [grad.float() for grad in super().get_grads_for_grad_norm(grad_norm_group) if grad.numel()]

    @torch.no_grad()
    def count_zeros(self) -> float:
        """Zeros of all gradients, each counted on one of the ranks that have it; stock's count takes them all."""
        shards = super()._filter_grads_for_norm(self.get_parameters())
        zeros = sum(shard.numel() - int(torch.count_nonzero(shard)) for shard in shards)
        total = torch.tensor([zeros], dtype=torch.int64, device=self.model_chunks[0].device)
        dist.all_reduce(total, group=self.get_grad_stats_parallel_group())
        return float(total.item())

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Scales gradients of any dtype down to a total norm of at most `clip_grad`; returns the norm before.

        Parameters that stock tags with a gradient-norm group are clipped by the norm of their group.
        """
        norm: float = self.get_grad_norm()
        norms = {None: norm, **self._compute_grad_norms_by_group()}
        for parameter in self.get_parameters():
            local = local_gradient(parameter)
            if local is None:
                continue
            own_norm = norms.get(getattr(parameter, "grad_norm_group", None), norm)
            scale = torch.as_tensor(clip_grad / (own_norm + _NORM_EPSILON))
            local.mul_(scale.to(local.device).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, float | None]:
        """As stock's optimizer without sharding reports it: a norm even when gradients aren't clipped, and no count of
        zeros unless it was asked for."""
        success, norm, zeros = super().step()
        if norm is not None and not self.config.clip_grad > 0:
            norm = self.get_grad_norm()
        return success, norm, zeros if self.config.log_num_zeros_in_grad else None

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Steps the shards this rank holds rows of, and starts to bring the new weights to their users."""
        with self._without_empty_gradients():
            return super().step_with_ready_grads()

    @contextmanager
    def _without_empty_gradients(self) -> Iterator[None]:
        """Fused optimizers fail on empty tensors or leave the others of the group unchanged; torch's own don't."""
        hidden: dict[nn.Parameter, torch.Tensor] = {}
        if not _is_torch_optimizer(self.optimizer):
            for parameter in self.get_parameters():
                if parameter.grad is not None and local_gradient(parameter) is None:
                    hidden[parameter], parameter.grad = parameter.grad, None
        yield
        for parameter, gradient in hidden.items():
            parameter.grad = gradient

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        locals_ = (local_gradient(parameter) for parameter in self.get_parameters())
        return [local for local in locals_ if local is not None]

    def _copy_main_params_to_model_params(self) -> None:
        for chunk in self.model_chunks:
            chunk.mark_weights_updated()

    # Checkpoints

    def sharded_state_dict(
        self, model_sharded_state_dict: Any = None, is_loading: bool = False, *unused: Any, **metadata: Any
    ) -> dict[str, Any]:
        """State by parameter name and the groups' options, on the optimizer's own memory: saved and loaded in place.

        To load, `create_missing_state` comes first: only the checkpoint knows what state there is.
        """
        entry = optimizer_entry(self.optimizer, self._names())
        scaler = self.grad_scaler.state_dict() if self.grad_scaler else None
        return {**entry, SCALER: scaler} if scaler else entry

    def create_missing_state(self, saved: Mapping[str, Mapping[str, SavedState]]) -> None:
        """Gives parameters without state what a checkpoint holds for them, without a step."""
        create_missing_state(self.optimizer, self._names(), saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the options and loss scale of a `sharded_state_dict` whose state was loaded in place."""
        restore_groups(self.optimizer, state_dict[GROUPS])
        if self.grad_scaler and SCALER in state_dict:
            self.grad_scaler.load_state_dict(state_dict[SCALER])

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by the names that checkpoints have for them."""
        assert len(self.model_chunks) == 1
        return dict(self.model_chunks[0].root.named_parameters())

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self.named_parameters().items()}

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Called after model weights were loaded; those are the main weights here."""
        self._copy_main_params_to_model_params()


def _is_torch_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.split(".")[0] == "torch"
