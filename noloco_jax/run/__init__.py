"""Checkpoints, evaluation, metrics, banner and curves of a run."""
