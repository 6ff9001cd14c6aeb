"""The one exchange before a save: ranks that would save different keys learn of it, and none waits for another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .collective_errors import on_every_rank, outcome_of, problems_together
from .errors import CheckpointError

_LISTED = 20


class Offer(NamedTuple):
    """What a rank is about to save: values by key, and how keys begin that it may lack where others have them.

    Those are states of parameters this rank holds nothing of, for which some optimizers keep none.
    """

    values: Mapping[str, Any]
    may_lack: Sequence[str] = ()


def build_alike[T](build: Callable[[], T], offer_of: Callable[[T], Offer], group: dist.ProcessGroup | None = None) -> T:
    """What ``build`` returns on this rank, once all ranks of the group have built the same keys, shapes and dtypes.

    One collective, of a digest per rank; where they differ another one, of the keys. ``build`` must make none itself.

    Raises:
        CheckpointError: it raised on some rank, or ranks differ: the same on every rank, naming keys and ranks.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return on_every_rank(build, group)
    built, problem = outcome_of(build)
    offer = Offer({}) if problem else offer_of(built)
    kinds = {key: _kind(value) for key, value in offer.values.items()}
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, (problem, _digest(kinds)), group=group)
    if text := problems_together([said for said, _ in answers]):
        raise CheckpointError(text)
    if len({digest for _, digest in answers}) > 1:
        dist.all_gather_object(answers, (kinds, tuple(offer.may_lack)), group=group)
        if text := _differences(answers):
            raise CheckpointError(text)
    result: T = built
    return result


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "object"


def _digest(kinds: Mapping[str, str]) -> bytes:
    return hashlib.sha256(json.dumps(sorted(kinds.items())).encode()).digest()


def _differences(answers: Sequence[tuple[Mapping[str, str], Sequence[str]]]) -> str | None:
    by_key: dict[str, dict[str, list[int]]] = {}
    for key in sorted({key for kinds, _ in answers for key in kinds}):
        said: dict[str, list[int]] = {}
        for rank, (kinds, may_lack) in enumerate(answers):
            if key in kinds or not key.startswith(tuple(may_lack)):
                said.setdefault(kinds.get(key, "missing"), []).append(rank)
        if len(said) > 1:
            by_key[key] = said
    if not by_key:
        return None
    lines = [
        f"  {key}: {'; '.join(f'{what} on {_ranks(ranks)}' for what, ranks in said.items())}"
        for key, said in list(by_key.items())[:_LISTED]
    ]
    more = [f"  and {len(by_key) - _LISTED} more"] if len(by_key) > _LISTED else []
    return "\n".join([f"ranks would save different things, {len(by_key)} keys differ:", *lines, *more])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
