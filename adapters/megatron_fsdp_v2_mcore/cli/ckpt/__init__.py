"""`mfsdp2 ckpt`: commands that look into checkpoints and change them."""
