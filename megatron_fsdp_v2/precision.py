"""Data types of compute weights, main weights, main gradients and gradient communication."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from .arguments import is_torchs


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype each buffer has. ``None`` keeps what is described.

    Attributes:
        param_dtype: dtype of the weights that forward and backward compute with. None: the parameter's own.
        reduce_dtype: FSDP2's name for ``grad_comm_dtype``; give one of them, or the same value twice.
        output_dtype: dtype floating-point outputs of the unit are cast to. None: no cast.
        cast_forward_inputs: cast floating-point inputs of the unit to ``param_dtype``, if that is set.
        main_params_dtype: dtype of the weights the optimizer steps. None: the parameter's own.
        main_grads_dtype: dtype gradients are accumulated in over micro-batches. None: that of the main weights.
            The optimizer sees gradients in the dtype of the main weights whatever this is.
        grad_comm_dtype: dtype gradients are reduced in. None: ``main_grads_dtype`` if that is set, else the dtype
            of the compute weights.

    Raises:
        TypeError: a field holds something else than a floating-point dtype.
        ValueError: ``reduce_dtype`` and ``grad_comm_dtype`` contradict each other.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "cast_forward_inputs":
                if not isinstance(value, bool):
                    raise TypeError(f"MixedPrecisionPolicy.cast_forward_inputs must be a bool, got {value!r}")
            elif value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise TypeError(f"MixedPrecisionPolicy.{spec.name} must be a floating-point dtype, got {value!r}")
        if self.reduce_dtype and self.grad_comm_dtype and self.reduce_dtype != self.grad_comm_dtype:
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype} and grad_comm_dtype={self.grad_comm_dtype} name the same setting; "
                "give one of them"
            )

    def resolve(self, dtype: torch.dtype) -> GroupPrecision:
        """The four dtypes of a group whose parameters are stored in ``dtype``."""
        if not dtype.is_floating_point:
            return GroupPrecision(dtype, dtype, dtype, dtype)
        compute = self.param_dtype or dtype
        main = self.main_params_dtype or dtype
        grads = self.main_grads_dtype or main
        comm = self.grad_comm_dtype or self.reduce_dtype or self.main_grads_dtype or compute
        return GroupPrecision(compute, main, grads, comm)


def mixed_precision_policy(policy: object) -> MixedPrecisionPolicy:
    """Ours with the fields of torch's policy of the same name, or ours itself; the plain one for None.

    Raises:
        TypeError: it is neither.
    """
    if policy is None:
        return MixedPrecisionPolicy()
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if is_torchs(policy, "MixedPrecisionPolicy"):
        return MixedPrecisionPolicy(**{spec.name: getattr(policy, spec.name) for spec in fields(policy)})  # type: ignore[arg-type]
    raise TypeError(f"mp_policy must be a megatron_fsdp_v2.MixedPrecisionPolicy, got {type(policy).__name__}")


@dataclass(frozen=True, slots=True)
class GroupPrecision:
    """Resolved dtypes of one parameter group."""

    compute: torch.dtype
    main: torch.dtype
    grads: torch.dtype
    comm: torch.dtype
