"""Figures of a run: metrics files, evaluations, pictures, and the console."""
