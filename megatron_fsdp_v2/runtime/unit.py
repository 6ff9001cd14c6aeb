"""A unit: a module and the parameter groups it owns, with the state of its weights and of its pass."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from ..materialize import Valueless
from ..memory.host_copies import HostCopies, Kind
from ..precision import MixedPrecisionPolicy
from ..sharding.buffer import gather_together
from ..sharding.mesh import DataParallelMesh
from ..sharding.parameter_group import ParameterGroup, memory_of
from .side_outputs import SideOutputs
from .streams import Pending, Streams

if TYPE_CHECKING:
    from .agreement import Mode
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
    """State of one call of ``fully_shard``: of its module, or its modules, which are gathered and freed together.

    ``owners`` are they and those below them in no inner unit.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        owners: Sequence[nn.Module],
        groups: Sequence[ParameterGroup],
        mesh: DataParallelMesh,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._module_ids = {id(module) for module in modules}
        self.name = ", ".join([type(module).__name__ for module in modules])
        self.side_outputs = SideOutputs(owners)
        self.groups = list(groups)
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        # Asked for by name, and not just the usual of a root, weights also stay for the next forward without gradients.
        self.keeps_weights = reshard_after_forward is False
        self.reshard_after_backward = True
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.defers_partial_gradients = False
        self.reduces_unused = False
        self.unshard_in_backward = True
        self.is_last_backward = True
        self.agreement_mode: Mode = "first_step"
        self.post_optim_event: Any = None
        # What a user asked to gather ahead, in place of the unit that is expected next.
        self.forward_prefetch: tuple[Unit, ...] = ()
        self.backward_prefetch: tuple[Unit, ...] = ()
        # What came on the meta device and was not initialised. Called for, and forgotten, when the unit first runs.
        self.valueless: list[Valueless] = []
        self.context: Context | None = None
        self.host_copies = HostCopies()
        self.phase = Phase.IDLE
        # Backward calls begun and not ended: a module called twice may run them interleaved.
        self.active_backwards = 0
        self.is_bound = False
        self.prefetched = False
        # Of the present or last forward: the version of its weights, whether a backward may follow, and, in a unit of
        # several modules, those that have still to run and what their backwards share.
        self.forward_version = -1
        self.awaits_backward = False
        self.backward_begun: list[bool] | None = None
        self._to_run: set[int] = set()
        self._gather: Pending | None = None
        self._swaps: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter]] = []

    @property
    def modules(self) -> list[nn.Module]:
        """The modules, in the order given to ``fully_shard``."""
        modules = [ref() for ref in self._modules]
        return [module for module in modules if module is not None]

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

    def begin_forward(self, module: nn.Module) -> None:
        """The first of the unit's modules is about to run."""
        self.move_to(Phase.FORWARD)
        self.awaits_backward = False
        if len(self._modules) > 1:
            self._to_run = self._module_ids - {id(module)}
            self.backward_begun = []

    def note_run(self, module: nn.Module) -> None:
        """Another of the unit's modules is about to run."""
        self._to_run.discard(id(module))

    def awaits(self, module: nn.Module) -> bool:
        """Whether the module has still to run in the present forward of a unit of several."""
        return id(module) in self._to_run

    def forget_rest(self) -> None:
        """Modules that didn't run in the present forward won't."""
        self._to_run.clear()

    @property
    def all_ran(self) -> bool:
        """Whether no module has still to run in the present forward."""
        return not self._to_run

    @property
    def frees_after_forward(self) -> bool:
        """Whether the weights of the present forward are kept neither for its backward nor for a later forward."""
        return bool(self.reshard_after_forward) or not (self.awaits_backward or self.keeps_weights)

    def check_values(self) -> None:
        """Refuse to compute with what never got a value.

        Raises:
            RuntimeError: a parameter or buffer that came on the meta device was neither initialised nor loaded.
        """
        missing = [entry.name for entry in self.valueless if entry.is_still()]
        if missing:
            raise RuntimeError(
                f"{', '.join(missing)} of unit {self.name!r} came on the meta device and never got a value; initialise "
                "or load it after fully_shard, or give its module reset_parameters()"
            )
        self.valueless = []

    def warn_of_hooks(self) -> None:
        """Tell of hooks on parameters that nobody will call."""
        hooked = [
            name
            for group in self.groups
            for name, param in zip(group.names, group.sharded_params, strict=True)
            if param._backward_hooks
        ]
        if hooked:
            warnings.warn(
                f"{', '.join(hooked)} of unit {self.name!r} have hooks from register_hook, which autograd never calls "
                "for sharded parameters; use register_post_accumulate_grad_hook",
                stacklevel=2,
            )

    def prepare(self) -> None:
        """Build what computing needs. Runs once, when the unit joins a context."""
        assert self.context is not None
        for index, group in enumerate(self.groups):
            group.prepare(self.context.allocator, self.name if len(self.groups) == 1 else f"{self.name}[{index}]")
            pairs = zip(group.owners, group.sharded_params, group.unsharded_params, strict=True)
            for owners, sharded, unsharded in pairs:
                for owner, name in owners:
                    self._swaps.append((owner._parameters, name, sharded, unsharded))

    def check_parameters(self) -> None:
        """Refuse to go on with parameters that buffers don't stand behind any more.

        Raises:
            RuntimeError: a parameter was replaced, converted, frozen or unfrozen after sharding, or a gathered copy of
                it was written.
        """
        # Every forward pays for this, so it's looked for as a whole first, and by name only if something is wrong.
        shown = self.is_bound or all([params.get(name) is sharded for params, name, sharded, _ in self._swaps])
        if not self._swaps or not shown or not all([group.is_untouched() for group in self.groups]):
            self._refuse_changes()

    def _refuse_changes(self) -> None:
        for group in self.groups:
            params = zip(group.names, group.owners, group.sharded_params, group.local_params, strict=True)
            for name, owners, param, local in params:
                if param.requires_grad != group.trainable:
                    raise RuntimeError(
                        f"requires_grad of parameter {name!r} of unit {self.name!r} was changed after fully_shard, "
                        "which groups parameters by it; freeze parameters before"
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

    def weights_version(self) -> int:
        """Grows with every known write to the unit's main weights, or to their gathered copy, or when that moves."""
        return sum([group.main_version() for group in self.groups]) + self._copies_version()

    def _copies_version(self) -> int:
        return sum([group.gathered_version() + group.memory_generation for group in self.groups])

    def start_unshard(self, streams: Streams) -> int:
        """Issue the gather of the unit's weights, unless they are gathered and up to date; their version."""
        versions = [group.main_version() for group in self.groups]
        stale = [pair for pair in zip(self.groups, versions, strict=True) if not pair[0].is_gathered(pair[1])]
        self.host_copies.give_back([Kind.COMPUTE_WEIGHTS])
        if stale:
            assert self.context is not None
            if any([group.reads_main(version) for group, version in stale]):
                self.host_copies.give_back([Kind.MAIN_WEIGHTS])
            self.context.agreement.compare(f"gather unit {self.name!r}")
            self.finish_unshard()
            with torch.no_grad(), streams.gather_scope():
                transfers = [group.start_gather(version) for group, version in stale]
                works = gather_together([transfer for transfer in transfers if transfer is not None])
                self._gather = streams.issued_gather(works)
        return sum(versions) + self._copies_version()

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

    @property
    def shared_among(self) -> int | None:
        """How many neighbours keep the weights between them from forward to backward; None: the whole shard axis."""
        ranks = self.reshard_after_forward
        return None if ranks is None or isinstance(ranks, bool) else ranks

    def reshard(self, streams: Streams, keep_part: bool = False) -> None:
        """Show the sharded parameters and free gathered weights that a later use gathers again.

        With ``keep_part`` the rank's part of them stays, where they are to be gathered again among a few neighbours.
        """
        self.finish_unshard()
        self.prefetched = False
        self.bind_sharded()
        if any([group.gathers_per_use for group in self.groups]):
            streams.gather_after_compute()
            with streams.gather_scope():
                for group in self.groups:
                    if keep_part:
                        group.keep_part()
                    else:
                        group.drop_part()
                    group.release()

    def owns_full_memory_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether any of the tensors lies in the gathered weights that ``reshard`` frees."""
        freed = [group.full_memory for group in self.groups if group.gathers_per_use]
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
