"""Transient buffers: one tensor per key for good, and memory only between allocate and free."""

from __future__ import annotations

import pytest
import torch

from megatron_fsdp_v2.memory.allocator import BufferSpec, DynamicAllocator

SPEC = BufferSpec(6, torch.float32, torch.device("cpu"))


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_shape_dtype_and_device(dtype: torch.dtype) -> None:
    tensor = DynamicAllocator().allocate("key", BufferSpec(6, dtype, torch.device("cpu")))
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((6,), dtype, "cpu")
    assert nbytes(tensor) == 6 * dtype.itemsize


def test_a_key_keeps_its_tensor_and_storage() -> None:
    """Autograd may have saved a view in forward, which the gather for backward has to fill."""
    allocator = DynamicAllocator()
    tensor = allocator.allocate("key", SPEC)
    saved = tensor[2:5].view(1, 3)
    allocator.free("key")
    assert nbytes(tensor) == 0
    again = allocator.allocate("key", SPEC)
    assert again is tensor
    again.copy_(torch.arange(6.0))
    assert saved.tolist() == [[2.0, 3.0, 4.0]]


def test_allocating_a_live_key_keeps_its_contents() -> None:
    allocator = DynamicAllocator()
    allocator.allocate("key", SPEC).fill_(3.0)
    assert allocator.allocate("key", SPEC).tolist() == [3.0] * 6


def test_keys_are_live_between_allocate_and_free() -> None:
    allocator = DynamicAllocator()
    assert not allocator.is_live("key")
    first, other = allocator.allocate("key", SPEC), allocator.allocate("other", SPEC)
    assert allocator.is_live("key")
    allocator.free("key")
    allocator.free("key")
    assert not allocator.is_live("key")
    assert allocator.is_live("other")
    assert (nbytes(first), nbytes(other)) == (0, 24)


def test_keys_do_not_share_memory() -> None:
    allocator = DynamicAllocator()
    first, second = allocator.allocate(1, SPEC), allocator.allocate(2, SPEC)
    first.fill_(1.0)
    second.fill_(2.0)
    assert first.tolist() == [1.0] * 6


def test_an_empty_buffer() -> None:
    allocator = DynamicAllocator()
    spec = BufferSpec(0, torch.float32, torch.device("cpu"))
    for _ in range(2):
        assert allocator.allocate("key", spec).numel() == 0
        allocator.free("key")
