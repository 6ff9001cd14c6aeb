"""Measurements beside PyTorch FSDP2 and DDP: ``python -m benchmarks --help``."""
