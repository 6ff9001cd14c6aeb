"""A model folder of Hugging Face's becomes a v2 checkpoint of weights, as a run loads it."""

from __future__ import annotations

import math
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from megatron_fsdp_v2.checkpoint.collective_errors import causes_of
from megatron_fsdp_v2.checkpoint.comparison import compare_shapes
from megatron_fsdp_v2.checkpoint.errors import CheckpointError
from megatron_fsdp_v2.checkpoint.state_dict import MODEL_PREFIX

from .architecture import Architecture
from .hugging_face_config import architecture_of_config, read_config
from .names import Link, links_of
from .output import fresh_folder, write_text
from .run_settings import settings_of
from .stored_settings import KEY
from .tensor_folder import TensorFolder
from .values import in_dtype

# As stock names the checkpoint of a run without iterations, and the file that says which one is to be loaded.
RELEASE = "release"
_TRACKER = "latest_checkpointed_iteration.txt"
# Constants that older files have beside the weights.
_INVERSE_FREQUENCIES = ".rotary_emb.inv_freq"
_OUTPUT = "lm_head.weight"


@dataclass(frozen=True)
class ImportPlan:
    """What an import writes: each tensor with its dtype; and what of the source it leaves out since it isn't needed."""

    architecture: Architecture
    source: TensorFolder
    links: dict[str, Link]
    dtypes: dict[str, torch.dtype]
    ignored: list[str]

    @property
    def size(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(math.prod(link.shape) * self.dtypes[name].itemsize for name, link in self.links.items())


def plan_import(
    folder: Path,
    dtype: torch.dtype | None,
    *,
    fused_norms: bool,
    padded_vocabulary: int | None = None,
    divisor: int = 128,
) -> ImportPlan:
    """What is to be written, from the configuration and the headers of the files alone.

    Args:
        dtype: of the checkpoint's weights; by default that of each tensor in the files.
        fused_norms: whether the run that loads has transformer-engine's layers; see `links_of`.
        padded_vocabulary, divisor: see `architecture_of_config`.

    Raises:
        ValueError: the padded vocabulary is smaller than the vocabulary.
        CheckpointError: files are missing or damaged, the model can't be converted, or its tensors aren't those that
            its configuration says, listed.
    """
    architecture = architecture_of_config(read_config(folder), padded_vocabulary, divisor)
    source = TensorFolder(folder)
    # Before as many names are made.
    if architecture.layers > len(source.tensors):
        raise CheckpointError(f"{folder} has fewer tensors than layers ({architecture.layers:,})")
    links = links_of(architecture, fused_norms)
    ignored = [name for name in source.tensors if name.endswith(_INVERSE_FREQUENCIES)]
    if architecture.tied and _OUTPUT in source.tensors:
        ignored.append(_OUTPUT)
    _judge(source, links, ignored)
    dtypes = {link.megatron: _dtype_of(link, source, dtype) for link in links}
    return ImportPlan(architecture, source, {link.megatron: link for link in links}, dtypes, ignored)


def import_model(plan: ImportPlan, out: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Writes the folder `out`, which has its name only once all is in it; one tensor at a time is in memory.

    Args:
        progress: called with the bytes read so far and those of all tensors.

    Raises:
        ValueError: there is something at `out`.
        CheckpointError: something can't be read or written, or doesn't fit into the dtype.
    """
    stand_ins = {
        name: torch.empty(link.shape, dtype=plan.dtypes[name], device="meta") for name, link in plan.links.items()
    }
    state = {"model": stand_ins, KEY: Namespace(**settings_of(plan.architecture))}
    with fresh_folder(out) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        planner = _LatePlanner(plan, progress)
        try:
            dcp.save(state, checkpoint_id=folder / RELEASE, planner=planner, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"{out} could not be written: {causes_of(error)}") from error
        write_text(folder / _TRACKER, RELEASE)


class _LatePlanner(DefaultSavePlanner):
    """DCP's usual planner, except that a tensor gets its values at the moment when it is written."""

    def __init__(self, plan: ImportPlan, progress: Callable[[int, int], None] | None) -> None:
        super().__init__()
        self._plan = plan
        self._progress = progress
        self._done = 0

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if not isinstance(object, torch.Tensor):
            return super().transform_object(write_item, object)
        name = write_item.index.fqn.removeprefix(MODEL_PREFIX)
        tensor = _converted(self._plan, name)
        self._done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done, self._plan.size)
        return tensor


def _converted(plan: ImportPlan, name: str) -> torch.Tensor:
    link, dtype = plan.links[name], plan.dtypes[name]
    try:
        return link.join([in_dtype(plan.source.read(part), dtype) for part in link.hugging_face])
    except ValueError as error:
        raise CheckpointError(f"{', '.join(link.hugging_face)} of {plan.source.path}: {error}") from error


def _dtype_of(link: Link, source: TensorFolder, chosen: torch.dtype | None) -> torch.dtype:
    dtypes = {source.dtype_of(name) for name in link.hugging_face}
    if chosen is not None:
        return chosen
    if len(dtypes) > 1:
        raise CheckpointError(f"{', '.join(link.hugging_face)} are of several dtypes; choose one by --dtype")
    return dtypes.pop()


def _judge(source: TensorFolder, links: Sequence[Link], ignored: Sequence[str]) -> None:
    wanted = {name: shape for link in links for name, shape in link.hugging_face.items()}
    kept = {name: tensor.shape for name, tensor in source.tensors.items() if name not in ignored}
    if differences := compare_shapes(wanted, kept, ("by the configuration", "in the file")):
        raise CheckpointError(f"{source.path} does not hold the model of its config.json:\n{differences.report()}")
