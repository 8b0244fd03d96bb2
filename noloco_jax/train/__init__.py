"""Training of a Llama, with checkpoints, metrics and pictures."""
