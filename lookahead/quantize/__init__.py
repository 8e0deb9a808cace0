"""What `lookahead quantize` writes packed checkpoints with."""
