"""Values of Megatron's tensors against a head-by-head count, and back."""

import pytest
import torch
from megatron_fsdp_v2_mcore.conversion.values import (
    AttentionHeads,
    join_qkv,
    split_qkv,
    with_vocabulary_padding,
    without_vocabulary_padding,
)

SHAPES = [AttentionHeads(8, 2, 4), AttentionHeads(4, 4, 2), AttentionHeads(6, 1, 3)]


@pytest.mark.parametrize("attention", SHAPES)
@pytest.mark.parametrize("rest", [(5,), ()])
def test_each_head_comes_from_its_place_in_the_group(attention: AttentionHeads, rest: tuple[int, ...]) -> None:
    fused = torch.randn(attention.fused_rows, *rest)
    size, per_group = attention.head_size, attention.heads_per_group
    query, key, value = split_qkv(fused, attention)
    for head in range(attention.heads):
        start = ((head // per_group) * (per_group + 2) + head % per_group) * size
        assert torch.equal(query[head * size : (head + 1) * size], fused[start : start + size])
    for group in range(attention.query_groups):
        start = (group * (per_group + 2) + per_group) * size
        assert torch.equal(key[group * size : (group + 1) * size], fused[start : start + size])
        assert torch.equal(value[group * size : (group + 1) * size], fused[start + size : start + 2 * size])
    assert torch.equal(join_qkv(query, key, value, attention), fused)


def test_vocabulary_padding_goes_and_comes_back_as_zeros() -> None:
    table = torch.randn(8, 3)
    plain = without_vocabulary_padding(table, 5)
    assert torch.equal(plain, table[:5])
    padded = with_vocabulary_padding(plain, 8)
    assert torch.equal(padded[:5], plain)
    assert padded.shape == (8, 3)
    assert not padded[5:].any()


def test_wrong_sizes_are_named() -> None:
    attention = SHAPES[0]
    with pytest.raises(ValueError, match="query_groups is 3"):
        AttentionHeads(8, 3, 4)
    with pytest.raises(ValueError, match="head_size is 0"):
        AttentionHeads(8, 2, 0)
    with pytest.raises(ValueError, match="linear_qkv has shape"):
        split_qkv(torch.zeros(47, 5), attention)
    with pytest.raises(ValueError, match="key has shape"):
        join_qkv(torch.zeros(32, 5), torch.zeros(7, 5), torch.zeros(8, 5), attention)
    with pytest.raises(ValueError, match="value is"):
        join_qkv(torch.zeros(32, 5), torch.zeros(8, 5), torch.zeros(8, 6), attention)
    with pytest.raises(ValueError, match="vocabulary is 9"):
        without_vocabulary_padding(torch.zeros(8, 3), 9)
    with pytest.raises(ValueError, match="padded vocabulary is 7"):
        with_vocabulary_padding(torch.zeros(8, 3), 7)
