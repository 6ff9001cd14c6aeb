"""`mfsdp2 ckpt convert`: checkpoints of v2 and model folders of Hugging Face."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .session import parse_memory, progress_bar, session
from .text import counted, dtype_name, print_columns, size_text

if TYPE_CHECKING:
    import torch

    from ...conversion.names import Link


class Format(StrEnum):
    """Forms of a model on disk."""

    V2 = "v2"
    HF = "hf"


class Dtype(StrEnum):
    """Dtypes of weights in files."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Layers(StrEnum):
    """Megatron's layers, by which norms have other names."""

    TRANSFORMER_ENGINE = "transformer_engine"
    LOCAL = "local"


_DEFAULT_SHARD_SIZE = 5 * 10**9
_DEFAULT_DIVISOR = 128
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_shard_size(text: str) -> int:
    """Bytes, as Hugging Face's libraries understand them: 5GB is 5 * 10^9; 5GiB and 5G are powers of 1024."""
    number, unit = text.strip()[:-2].strip(), text.strip()[-2:].upper()
    if unit in _UNITS and number.isdecimal():
        return int(number) * _UNITS[unit]
    return parse_memory(text)


_DTYPE_HELP = "Of the weights. Default to hf: bf16 if the run computed in it, else fp32; from hf: as stored."
ShardSize = Annotated[
    int | None,
    typer.Option(
        parser=parse_shard_size,
        metavar="BYTES",
        help="To hf: of one file, 5GB by default; up to twice that is in memory.",
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option(min=1, help="To hf: number of tokens. Default: the run's --vocab-size, else with its padding."),
]
PaddedVocabSize = Annotated[
    int | None, typer.Option(min=1, help="From hf: rows of the tables in the run that loads OUT.")
]
Divisor = Annotated[
    int | None, typer.Option(min=1, help="From hf: that of the run, times its tensor-parallel size; 128 by default.")
]
TransformerImpl = Annotated[
    Layers | None, typer.Option(help="From hf: that of the run; transformer_engine by default.")
]


@dataclass(frozen=True)
class _Request:
    """What the command line said; None where it said nothing."""

    source: Path
    out: Path
    dry_run: bool
    dtype: Dtype | None
    max_shard_size: int | None
    vocab_size: int | None
    padded_vocab_size: int | None
    make_vocab_size_divisible_by: int | None
    transformer_impl: Layers | None


def convert(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="The checkpoint's folder, or the model's.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or an empty folder.")],
    to: Annotated[Format, typer.Option("--to", help="What is written.")] = Format.V2,
    come_from: Annotated[Format, typer.Option("--from", help="What SOURCE is.")] = Format.V2,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be written.")] = False,
    dtype: Annotated[Dtype | None, typer.Option(help=_DTYPE_HELP)] = None,
    max_shard_size: ShardSize = None,
    vocab_size: VocabSize = None,
    padded_vocab_size: PaddedVocabSize = None,
    make_vocab_size_divisible_by: Divisor = None,
    transformer_impl: TransformerImpl = None,
) -> None:
    """Convert a checkpoint to Hugging Face's safetensors, or the other way round.

    mfsdp2 ckpt convert RUN/iter_0001000 OUT --to hf

    mfsdp2 ckpt convert MODEL OUT --from hf

    For dense models such as Llama, Qwen2 and Qwen3. Reads and writes piece by piece, so a model may be larger than
    memory, and gives OUT its name when all is there. From hf, OUT has weights alone: a run loads it with --load OUT
    --finetune, or with --pretrained-checkpoint OUT. Tokenizers aren't converted.
    """
    request = _Request(
        source,
        out,
        dry_run,
        dtype,
        max_shard_size,
        vocab_size,
        padded_vocab_size,
        make_vocab_size_divisible_by,
        transformer_impl,
    )
    with session():
        _refuse_several_ranks()
        if (come_from, to) not in _CONVERSIONS:
            known = " or ".join(f"--from {a} --to {b}" for a, b in _CONVERSIONS)
            raise ValueError(f"--from {come_from} --to {to} is no conversion; give {known}")
        _CONVERSIONS[come_from, to](request)


def _to_hugging_face(request: _Request) -> None:
    from megatron_fsdp_v2.checkpoint.inspector import open_checkpoint

    from ...conversion.exporting import export, plan_export
    from ...conversion.output import check_is_free

    foreign = ("padded_vocab_size", "make_vocab_size_divisible_by", "transformer_impl")
    _refuse_options(request, "--to hf", *foreign)
    check_is_free(request.out)
    checkpoint = open_checkpoint(request.source)
    limit = _DEFAULT_SHARD_SIZE if request.max_shard_size is None else request.max_shard_size
    plan = plan_export(checkpoint, _torch_dtype(request.dtype), limit, request.vocab_size)
    if request.dry_run:
        _list_files(plan.files, plan.dtype)
    else:
        with progress_bar("converting", is_first=True) as progress:
            export(checkpoint, plan, request.out, progress)
    model = plan.architecture
    done = "to be written; a dry run, so nothing was" if request.dry_run else f"written to {request.out}"
    typer.echo(f"{model.family} model, {size_text(plan.size)} in {counted(len(plan.files), 'file')} {done}")
    if model.vocabulary == model.padded_vocabulary:
        typer.echo(f"all {model.vocabulary:,} rows of the vocabulary; if some are padding, give --vocab-size")


def _from_hugging_face(request: _Request) -> None:
    from ...conversion.importing import import_model, plan_import
    from ...conversion.output import check_is_free
    from ...conversion.run_settings import flags_of

    _refuse_options(request, "--from hf", "max_shard_size", "vocab_size")
    check_is_free(request.out)
    plan = plan_import(
        request.source,
        _torch_dtype(request.dtype),
        fused_norms=request.transformer_impl is not Layers.LOCAL,
        padded_vocabulary=request.padded_vocab_size,
        divisor=_DEFAULT_DIVISOR
        if request.make_vocab_size_divisible_by is None
        else request.make_vocab_size_divisible_by,
    )
    if request.dry_run:
        rows = [
            (f"model.{name}", dtype_name(plan.dtypes[name]), str(list(plan.links[name].shape))) for name in plan.links
        ]
        print_columns(("tensor", "dtype", "shape"), rows)
    else:
        with progress_bar("converting", is_first=True) as progress:
            import_model(plan, request.out, progress)
    if plan.ignored:
        typer.echo(f"left out, since nothing needs them: {', '.join(plan.ignored)}")
    done = "to be written; a dry run, so nothing was" if request.dry_run else f"written to {request.out}"
    model = plan.architecture
    typer.echo(f"{model.family} model, {size_text(plan.size)} in {counted(len(plan.links), 'tensor')} {done}")
    typer.echo(f"a run has this model, with a padded vocabulary of {model.padded_vocabulary:,}, by")
    typer.echo("\n".join(f"  {flags}" for flags in flags_of(model)))


def _list_files(files: "dict[str, list[Link]]", dtype: "torch.dtype") -> None:
    rows = [
        (file, name, dtype_name(dtype), str(list(shape)))
        for file, links in files.items()
        for link in links
        for name, shape in link.hugging_face.items()
    ]
    print_columns(("file", "tensor", "dtype", "shape"), rows)


def _refuse_several_ranks() -> None:
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(f"convert runs in one process, not {dist.get_world_size()}; start it without torchrun")


def _refuse_options(request: _Request, direction: str, *options: str) -> None:
    given = [f"--{option.replace('_', '-')}" for option in options if getattr(request, option) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} means nothing with {direction}; leave it out")


def _torch_dtype(dtype: Dtype | None) -> "torch.dtype | None":
    import torch

    known = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
    return None if dtype is None else known[dtype]


_CONVERSIONS: dict[tuple[Format, Format], Callable[[_Request], Any]] = {
    (Format.V2, Format.HF): _to_hugging_face,
    (Format.HF, Format.V2): _from_hugging_face,
}
