"""Looking into DCP checkpoints and changing what they list, without a model and without loading them whole."""
