"""Which files and documents are trained on, and which are validated on."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from noloco_jax.data.find_files import find_files, without_repeats
from noloco_jax.data.source import SourceOptions
from noloco_jax.errors import UserError

HELD_OUT_EVERY = 50

# The names by which Hugging Face's `datasets` knows the splits of a folder of files.
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_PATTERNS = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(names)})(?:[-._ 0-9]|$)", re.IGNORECASE)
    for split, names in _SPLIT_NAMES.items()
}


class HoldOut:
    """The items, of those numbered 0 to count - 1, in a part of them: "all", the "held_out" ones or the "rest".

    Every 50th item is held out, from the 26th on; of fewer than 50 items, the middle one.
    """

    def __init__(self, count: int, part: str):
        self._part, self.count = part, count
        self._every = max(1, min(HELD_OUT_EVERY, count))

    def count_before(self, item: Any) -> Any:
        """Number of items in front of `item` (an integer or an array of them) that belong to the part."""
        held_out = (item - self._every // 2 + self._every - 1) // self._every
        return {"all": item, "held_out": held_out, "rest": item - held_out}[self._part]

    def mask(self, start: int, stop: int) -> np.ndarray:
        """Whether each of the items start to stop - 1 belongs to the part: bool (stop - start,)."""
        if self._part == "all":
            return np.ones(stop - start, bool)
        held_out = np.arange(start, stop) % self._every == self._every // 2
        return held_out if self._part == "held_out" else ~held_out


def _split_in_parts(parts: Sequence[str]) -> str | None:
    """The split that the parts of a relative path name: "train", "validation", "test", or None.

    `train-00000-of-00002.parquet` and `val/0.jsonl` name one. The file's own name counts first, then the folder's.
    """
    return next((split for name in reversed(parts) if (split := _split_in_part(name))), None)


@functools.lru_cache(maxsize=1 << 14)
def _split_in_part(name: str) -> str | None:
    found = {split: match.start() for split, p in _SPLIT_PATTERNS.items() if (match := p.search(name))}
    return min(found, key=lambda split: found[split], default=None)


def split_files(options: SourceOptions, suffixes: Sequence[str]) -> tuple[list[str], str]:
    """(sorted files of `options.split`, each once, part of their documents that belongs to it, see `HoldOut`).

    Where some files are named after a split, training reads those of "train" alone, or else those that name none.
    Validation in the same folder reads those of "validation"; a part of the training files is held out if there are
    none. A validation folder of its own may also hold "test" files or files that name no split.

    Raises `UserError` if no file is left.
    """
    files = find_files(options, suffixes)
    root = Path(options.path).expanduser()
    by_split: dict[str | None, list[Path]] = {}
    for file in files:
        split = None if file == root else _split_in_parts(file.parts[len(root.parts) :])
        by_split.setdefault(split, []).append(file)
    if options.split == "validation" and not options.holds_both_splits:
        return without_repeats(by_split.get("validation") or by_split.get("test") or files), "all"
    if options.split == "validation" and "validation" in by_split:
        return without_repeats(by_split["validation"]), "all"
    training = by_split.get("train") or by_split.get(None)
    if training is None:
        raise UserError(
            f"{options.name} holds no file to train on: the names of all {len(files)} say validation or test, as "
            f"{files[0].name}; rename them, or name a single file"
        )
    return without_repeats(training), "all" if "validation" in by_split else options.part
