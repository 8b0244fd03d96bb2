"""What a run keeps, measures and says: checkpoints, evaluation, metrics, banner, curves."""
