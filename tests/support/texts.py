"""Text for tests to train on."""

import numpy as np


def lines_of_words(count: int) -> list[str]:
    """So many lines of made-up words, frequent and rare ones as in a language; always the same ones."""
    rng = np.random.default_rng(0)
    syllables = [consonant + vowel for consonant in "bdfglmnprst" for vowel in "aeiou"]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(200)]
    frequencies = 1 / np.arange(1, len(words) + 1)
    frequencies /= frequencies.sum()
    return [" ".join(rng.choice(words, rng.integers(4, 13), p=frequencies)) + "\n" for _ in range(count)]
