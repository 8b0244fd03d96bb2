"""A trained model written for other programs."""
