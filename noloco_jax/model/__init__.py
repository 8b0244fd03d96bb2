"""The Llama that noloco_jax trains: parameters, forward pass and loss as pure functions, and Hugging Face's format."""
