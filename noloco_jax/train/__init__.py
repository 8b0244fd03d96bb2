"""Training of a language model, with checkpoints, metrics and pictures."""
