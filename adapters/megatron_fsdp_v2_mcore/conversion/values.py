"""How values lie in Megatron's tensors and in those of Hugging Face."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionHeads:
    """Heads of a grouped-query attention.

    Raises ValueError if a number is below one or the query groups do not divide the heads.
    """

    heads: int
    query_groups: int
    head_size: int

    def __post_init__(self) -> None:
        for name in ("heads", "query_groups", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give a number of at least 1")
        if self.heads % self.query_groups:
            raise ValueError(f"query_groups is {self.query_groups}; give a divisor of the {self.heads} heads")

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.query_groups

    @property
    def fused_rows(self) -> int:
        return (self.heads + 2 * self.query_groups) * self.head_size


def split_qkv(fused: torch.Tensor, attention: AttentionHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value rows of a `linear_qkv` weight [fused rows, hidden] or bias [fused rows].

    Megatron keeps the rows by query group: the group's query heads, its key head, its value head.
    Raises ValueError if the number of rows is another one.
    """
    _check_rows("linear_qkv", fused, attention.fused_rows)
    rest = fused.shape[1:]
    grouped = fused.reshape(attention.query_groups, attention.heads_per_group + 2, attention.head_size, *rest)
    query, key, value = grouped.split([attention.heads_per_group, 1, 1], dim=1)
    return query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest)


def join_qkv(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention: AttentionHeads) -> torch.Tensor:
    """The `linear_qkv` tensor whose parts `split_qkv` gives back.

    Raises ValueError if a part has another number of rows, or if the parts differ in the other sizes or in dtype.
    """
    _check_rows("query", query, attention.heads * attention.head_size)
    for name, part in (("key", key), ("value", value)):
        _check_rows(name, part, attention.query_groups * attention.head_size)
        if part.shape[1:] != query.shape[1:] or part.dtype != query.dtype:
            raise ValueError(
                f"{name} is {tuple(part.shape)} {part.dtype}; it has to match query, {tuple(query.shape)} "
                f"{query.dtype}, in all but the rows"
            )
    rest = query.shape[1:]
    parts = [part.reshape(attention.query_groups, -1, attention.head_size, *rest) for part in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(attention.fused_rows, *rest)


def without_vocabulary_padding(table: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The first `vocabulary` rows of an embedding or output table [padded vocabulary, hidden].

    Raises ValueError if the table has fewer rows.
    """
    if not 1 <= vocabulary <= table.shape[0]:
        raise ValueError(f"vocabulary is {vocabulary}; give 1 to {table.shape[0]}, the rows of the table")
    return table[:vocabulary]


def with_vocabulary_padding(table: torch.Tensor, padded: int) -> torch.Tensor:
    """The table [vocabulary, hidden] with rows of zeros added up to `padded`.

    Raises ValueError if the table has more rows than that.
    """
    if padded < table.shape[0]:
        raise ValueError(f"padded vocabulary is {padded}; give at least {table.shape[0]}, the rows of the table")
    if padded == table.shape[0]:
        return table
    return torch.cat([table, table.new_zeros(padded - table.shape[0], *table.shape[1:])])


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy in another dtype, or in the same. Raises ValueError if a number becomes infinite."""
    copy = torch.empty(tensor.shape, dtype=dtype).copy_(tensor)
    is_narrower = torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    if is_narrower and not torch.equal(copy.isfinite(), tensor.isfinite()):
        raise ValueError(f"some values don't fit into {dtype}; choose another --dtype")
    return copy


def _check_rows(name: str, tensor: torch.Tensor, rows: int) -> None:
    if tensor.dim() < 1 or tensor.shape[0] != rows:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {rows} rows follow from the heads of the settings")
