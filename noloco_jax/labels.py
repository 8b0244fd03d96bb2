"""The label that is out of every loss, for data, model and tests alike."""

# Hugging Face's and PyTorch's convention.
IGNORED_LABEL = -100
