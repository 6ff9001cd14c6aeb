"""The `mfsdp2` command."""

import typer

from .ckpt.app import app as ckpt
from .doctor import doctor
from .explain import explain
from .run import run
from .train import train

# What follows the script, or isn't known, belongs to Megatron.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    help="Run stock Megatron training scripts with megatron_fsdp_v2, and look into checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    # A script's own traceback is shown as Python shows it.
    pretty_exceptions_enable=False,
)
app.command("run", context_settings={"allow_interspersed_args": False})(run)
app.command("explain", context_settings={"allow_interspersed_args": False})(explain)
app.command("doctor")(doctor)
app.command("train", context_settings=_PASS_ON)(train)
app.add_typer(ckpt, name="ckpt")

if __name__ == "__main__":
    app()
