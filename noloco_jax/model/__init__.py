"""The Llama that noloco_jax trains: an NNX module, its loss, text generation, and Hugging Face's format."""
