"""Measurement of the cost of late processes for each method."""
