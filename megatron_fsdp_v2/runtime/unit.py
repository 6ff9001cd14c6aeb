"""A unit: a module and the parameter groups it owns, with the state of its weights and of its pass."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from ..precision import MixedPrecisionPolicy
from ..sharding.buffer import gather_together
from ..sharding.mesh import DataParallelMesh
from ..sharding.parameter_group import ParameterGroup, memory_of
from .side_outputs import SideOutputs
from .streams import Pending, Streams

if TYPE_CHECKING:
    from .context import Context


class Phase(Enum):
    """What a unit is doing: at rest, in its forward, or between its first pre-backward and its last post-backward."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


_ALLOWED = {
    (Phase.IDLE, Phase.FORWARD),
    (Phase.FORWARD, Phase.IDLE),
    (Phase.IDLE, Phase.BACKWARD),
    (Phase.BACKWARD, Phase.IDLE),
}


class Unit:
    """State of one module that ``fully_shard`` was called on. ``modules`` are it and those below in no inner unit."""

    def __init__(
        self,
        module: nn.Module,
        modules: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        mesh: DataParallelMesh,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self._module = weakref.ref(module)
        self.name = type(module).__name__
        self.side_outputs = SideOutputs(modules)
        self.groups = list(groups)
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.defers_partial_gradients = False
        self.context: Context | None = None
        self.phase = Phase.IDLE
        # Backward calls begun and not ended: a module called twice may run them interleaved.
        self.active_backwards = 0
        self.is_bound = False
        self.prefetched = False
        self.forward_version = -1
        self._gather: Pending | None = None
        self._swaps: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None
        return module

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    def move_to(self, phase: Phase) -> None:
        """Change phase.

        Raises:
            RuntimeError: the unit can't go there from where it is.
        """
        if (self.phase, phase) not in _ALLOWED:
            raise RuntimeError(
                f"unit {self.name!r} can't enter {phase.value} while it is in {self.phase.value}; "
                "a unit must not call itself, and a backward must not start inside its own forward"
            )
        self.phase = phase

    def prepare(self) -> None:
        """Build what computing needs. Runs once, when the unit joins a context."""
        assert self.context is not None
        for group in self.groups:
            group.prepare(self.context.allocator)
            pairs = zip(group.owners, group.sharded_params, group.unsharded_params, strict=True)
            for owners, sharded, unsharded in pairs:
                for owner, name in owners:
                    self._swaps.append((owner._parameters, name, sharded, unsharded))

    def check_parameters(self) -> None:
        """Refuse to go on with parameters that buffers don't stand behind any more.

        Raises:
            RuntimeError: a parameter was replaced, converted, frozen, unfrozen or hooked after sharding, or a
                gathered copy of it was written.
        """
        for group in self.groups:
            params = zip(group.names, group.owners, group.sharded_params, group.local_params, strict=True)
            for name, owners, param, local in params:
                if param.requires_grad != group.trainable:
                    raise RuntimeError(
                        f"requires_grad of parameter {name!r} of unit {self.name!r} was changed after fully_shard, "
                        "which groups parameters by it; freeze parameters before"
                    )
                if param._backward_hooks:
                    raise RuntimeError(
                        f"parameter {name!r} of unit {self.name!r} has a hook from register_hook, which autograd never "
                        "calls for a sharded parameter; use register_post_accumulate_grad_hook"
                    )
                shown = self.is_bound or all([owner._parameters.get(key) is param for owner, key in owners])
                if not shown or param._local_tensor is not local:  # type: ignore[attr-defined]
                    raise RuntimeError(
                        f"parameter {name!r} of unit {self.name!r} was replaced or converted after fully_shard, so "
                        "its values would never be used; write into it in place, or convert it before"
                    )
            if group.lost_writes():
                raise RuntimeError(
                    f"gathered weights of unit {self.name!r} were written, which doesn't reach its parameters; write "
                    "those it shows at rest: after backward, under no_grad, or after reshard()"
                )

    @property
    def weights_version(self) -> int:
        """Grows with every known write to the unit's main weights, or to their gathered copy."""
        return sum([group.main_version + group.gathered_version for group in self.groups])

    @torch.no_grad()
    def start_unshard(self, streams: Streams) -> None:
        """Issue the gather of the unit's weights, unless they are gathered and up to date."""
        if all([group.is_gathered for group in self.groups]):
            return
        self.finish_unshard()
        with streams.gather_scope():
            transfers = [transfer for group in self.groups if (transfer := group.start_gather()) is not None]
            self._gather = streams.issued_gather(gather_together(transfers))

    def finish_unshard(self) -> None:
        """Wait until the gathered weights can be read on the present stream."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def bind_unsharded(self) -> None:
        """Put the parameters to compute with into the module."""
        if not self.is_bound:
            for params, name, _, unsharded in self._swaps:
                params[name] = unsharded
            self.is_bound = True

    def bind_sharded(self) -> None:
        """Put the sharded parameters into the module."""
        if self.is_bound:
            for params, name, sharded, _ in self._swaps:
                params[name] = sharded
            self.is_bound = False

    def reshard(self, streams: Streams) -> None:
        """Show the sharded parameters and free gathered weights that a later use gathers again."""
        self.finish_unshard()
        self.prefetched = False
        self.bind_sharded()
        if any([group.gathers_per_use for group in self.groups]):
            streams.gather_after_compute()
            with streams.gather_scope():
                for group in self.groups:
                    group.release()

    def owns_full_memory_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of the tensors lies in the gathered weights that ``reshard`` frees."""
        freed = {id_of for group in self.groups if (id_of := group.full_memory()) is not None}
        return any([memory_of(tensor) in freed for tensor in tensors]) if freed else False

    def stages_to_run(self, group: ParameterGroup) -> int:
        """How many reduction stages the present micro-batch runs for a group."""
        assert group.gradients is not None
        if not self.requires_gradient_sync:
            return 0
        stages = group.gradients.stages
        if self.defers_partial_gradients:
            stages = min(stages, group.gradients.stages_before_deferred)
        return stages if self.requires_all_reduce else min(stages, 1)
