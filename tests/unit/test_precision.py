"""Which dtype each buffer gets, and what a policy refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_fsdp_v2 import MixedPrecisionPolicy

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16


@pytest.mark.parametrize(
    ("fields", "stored", "expected"),
    [
        # compute, main weights, main gradients, communication
        ({}, FP32, (FP32, FP32, FP32, FP32)),
        ({}, BF16, (BF16, BF16, BF16, BF16)),
        ({"param_dtype": BF16}, FP32, (BF16, FP32, FP32, BF16)),
        ({"param_dtype": BF16, "reduce_dtype": FP32}, FP32, (BF16, FP32, FP32, FP32)),
        ({"param_dtype": BF16, "grad_comm_dtype": FP16}, FP32, (BF16, FP32, FP32, FP16)),
        ({"param_dtype": BF16, "reduce_dtype": FP16, "grad_comm_dtype": FP16}, FP32, (BF16, FP32, FP32, FP16)),
        ({"main_params_dtype": FP32}, BF16, (BF16, FP32, FP32, BF16)),
        ({"main_grads_dtype": FP32}, BF16, (BF16, BF16, FP32, FP32)),
        ({"main_params_dtype": FP32, "main_grads_dtype": BF16}, BF16, (BF16, FP32, BF16, BF16)),
        ({"main_grads_dtype": FP32, "grad_comm_dtype": BF16}, BF16, (BF16, BF16, FP32, BF16)),
        ({"output_dtype": BF16, "cast_forward_inputs": False}, FP32, (FP32, FP32, FP32, FP32)),
        ({"param_dtype": BF16, "main_params_dtype": FP32}, torch.int64, (torch.int64,) * 4),
    ],
)
def test_dtypes_of_a_group(
    fields: dict[str, torch.dtype], stored: torch.dtype, expected: tuple[torch.dtype, ...]
) -> None:
    precision = MixedPrecisionPolicy(**fields).resolve(stored)  # type: ignore[arg-type]
    assert (precision.compute, precision.main, precision.grads, precision.comm) == expected


DTYPE_FIELDS = [field.name for field in dataclasses.fields(MixedPrecisionPolicy) if field.name != "cast_forward_inputs"]


@pytest.mark.parametrize("field", DTYPE_FIELDS)
@pytest.mark.parametrize("value", ["bf16", torch.int32, 16, torch.bool])
def test_fields_hold_floating_point_dtypes(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"MixedPrecisionPolicy\.{field} must be a floating-point dtype"):
        MixedPrecisionPolicy(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_cast_forward_inputs_is_a_bool(value: object) -> None:
    with pytest.raises(TypeError, match="cast_forward_inputs must be a bool"):
        MixedPrecisionPolicy(cast_forward_inputs=value)  # type: ignore[arg-type]


def test_two_names_of_one_setting_must_agree() -> None:
    with pytest.raises(ValueError, match=r"reduce_dtype=torch\.float32 and grad_comm_dtype=torch\.bfloat16"):
        MixedPrecisionPolicy(reduce_dtype=FP32, grad_comm_dtype=BF16)


def test_policies_are_values() -> None:
    assert MixedPrecisionPolicy(param_dtype=BF16) == MixedPrecisionPolicy(param_dtype=BF16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        MixedPrecisionPolicy().param_dtype = BF16  # type: ignore[misc]
