"""Checkpoints of sharded modules on PyTorch DCP."""
