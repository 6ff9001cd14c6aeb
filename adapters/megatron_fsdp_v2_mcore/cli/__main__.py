"""`python -m megatron_fsdp_v2_mcore.cli` is the `mfsdp2` command, for launchers that start a module."""

from .main import app

app(prog_name="mfsdp2")
