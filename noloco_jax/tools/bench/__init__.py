"""Measurement of a configuration's speed and memory."""
