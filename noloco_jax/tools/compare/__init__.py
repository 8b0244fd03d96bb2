"""Comparison of methods on one model: the runs, their results, the table and the pictures."""
