"""Megatron-Core adapter: brings `megatron_fsdp_v2` into stock Megatron training scripts.

Importing this package is cheap and changes nothing. `register()` makes the flag `--use-megatron-fsdp-v2` known to
Megatron in this process; installed environments do that by themselves when the flag is on the command line.
"""

__all__ = ["register", "unregister"]


def register() -> None:
    """Apply every patch of `patches.PATCHES`: at once to imported Megatron modules, to the others when they load.

    Calling it again changes nothing. Child processes started afterwards register themselves.

    Raises:
        RuntimeError: megatron-core is absent, of an unsupported version, or not as the patch table expects it. The
            message has one line per problem; nothing has been changed.
    """
    from . import import_hook

    import_hook.register()


def unregister() -> None:
    """Undo `register()`: restore every patched object, and forget the modules still awaited."""
    from . import import_hook

    import_hook.unregister()
