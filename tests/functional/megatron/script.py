"""A training script as a user would write it; it knows nothing of the plug-in."""

from tests.functional.megatron.driver import train_from_command_line

if __name__ == "__main__":
    train_from_command_line()
