"""Perplexity of a trained model on given texts."""
