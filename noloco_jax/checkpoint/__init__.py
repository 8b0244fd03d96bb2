"""Checkpoints of a run: saves, digests, elastic restores, and the trained models in them."""
