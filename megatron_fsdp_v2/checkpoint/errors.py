"""What goes wrong with a checkpoint, as opposed to a wrong argument."""


class CheckpointError(RuntimeError):
    """A checkpoint can't be read, trusted or changed. The message names the file or key, and a remedy if any."""
