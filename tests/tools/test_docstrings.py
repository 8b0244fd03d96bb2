"""Docstrings open with a verb or a noun phrase that stands alone, so that a list of them can be searched and read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

ROOTS = [ROOT / "noloco_jax", ROOT / "tests"]
# Each opens a relative clause, a question or half a sentence: the reader has to find out what is meant.
OPENINGS = (
    "what",
    "whether",
    "which",
    "who",
    "why",
    "how",
    "of",
    "as",
    "to",
    "where",
    "when",
    "that",
    "those",
    "the same",
)
MOST = 0.03  # of a room's docstrings


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, docstring) of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def opens_badly(text: str) -> bool:
    first = text.replace(",", " ").replace(":", " ").lower().split()
    return first[0] in OPENINGS or " ".join(first[:2]) in OPENINGS


def rooms() -> dict[str, list[Path]]:
    """Map each room, of the package and of the tests, to its files; modules beside the rooms are one room."""
    found: dict[str, list[Path]] = {}
    for root in ROOTS:
        for path in sorted(root.rglob("*.py")):
            first, *below = path.relative_to(root).parts
            found.setdefault(f"{root.name}/{first if below else ''}", []).append(path)
    return found


@pytest.mark.parametrize("room", sorted(rooms()))
def test_docstrings_open_with_a_verb_or_a_noun(room):
    texts = [(f"{path.name}:{line}", text) for path in rooms()[room] for line, text in docstrings(path)]
    bad = [f"{place} {text.splitlines()[0]}" for place, text in texts if opens_badly(text)]
    assert len(bad) <= MOST * len(texts), "\n".join(bad)


@pytest.mark.parametrize(
    ("text", "is_bad"),
    [
        ("What a run keeps.", True),
        ("Of this island.", True),
        ("The same for all.", True),
        ("Whether, and where.", True),
        ("The samples of a run.", False),
        ("Total of all.", False),
        ("Return what is kept.", False),
    ],
)
def test_bad_openings_are_recognized(text, is_bad):
    assert opens_badly(text) is is_bad
