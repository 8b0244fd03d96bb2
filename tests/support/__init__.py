"""Helpers of several test files: makers of configurations, models and data, oracles, runs in processes."""
