"""The commands of `mfsdp2 ckpt` by name."""

import typer

from .changes import remove, rename
from .comparing import compare_checkpoints
from .converting import convert
from .listing import list_keys
from .printing import print_keys

app = typer.Typer(
    help="Look into DCP checkpoints, convert them and change their keys.\n\n"
    "Plain ones are understood, stock Megatron's (torch_dist and fsdp_dtensor) and those of v2. "
    "The commands need no GPU, run nothing that is stored in a checkpoint, and work alone or as ranks that share the "
    "reading: "
    "torchrun --nproc-per-node 4 --no-python mfsdp2 ckpt compare A B. "
    "Exit codes: 0 fine, 1 a difference (compare), 2 an error.",
    no_args_is_help=True,
)
app.command("list")(list_keys)
app.command("print")(print_keys)
app.command("compare")(compare_checkpoints)
app.command("convert")(convert)
app.command("rename")(rename)
app.command("remove")(remove)
