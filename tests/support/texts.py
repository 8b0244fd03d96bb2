"""Text for tests to train on."""

import string

import numpy as np


def lines_of_words(count: int) -> list[str]:
    """So many lines of made-up words, always the same ones; a model learns the spaces soon and the letters hardly."""
    rng = np.random.default_rng(0)
    letters = list(string.ascii_lowercase)

    def word() -> str:
        return "".join(rng.choice(letters, rng.integers(1, 10)))

    return [" ".join(word() for _ in range(rng.integers(4, 13))) + "\n" for _ in range(count)]
