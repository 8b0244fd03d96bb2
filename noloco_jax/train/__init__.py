"""Trains a Llama, with checkpoints, metrics and pictures."""
