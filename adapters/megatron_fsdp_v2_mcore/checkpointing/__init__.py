"""How Megatron's own save and load treat a model sharded by v2."""
