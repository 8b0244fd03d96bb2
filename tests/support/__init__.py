"""What several test files share: makers of configurations, models and data, oracles, runs in processes."""
