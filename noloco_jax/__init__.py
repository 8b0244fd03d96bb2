"""NoLoCo for JAX: train model replicas that average with one random other instead of all-reducing."""
