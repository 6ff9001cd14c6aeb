"""Conversion between v2 checkpoints and Hugging Face safetensors."""
