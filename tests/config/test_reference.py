"""The page of all fields, `configs/FIELDS.md`."""

import re
from pathlib import Path

import noloco_jax.config
from noloco_jax.config import known_fields
from noloco_jax.config.changes import on_resume
from noloco_jax.config.reference import page
from noloco_jax.optim.methods import METHODS

FILE = Path(noloco_jax.config.__file__).parents[2] / "configs" / "FIELDS.md"


def rows(text: str) -> dict[str, list[str]]:
    """Map each field's dotted path to the cells of its row, its own name without the mark first."""
    found, group = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            group = "".join(re.findall(r"`(.*)`", line))
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line[1:-1].split("|")]
            found[f"{group}.{cells[0].split('`')[1]}".lstrip(".")] = cells
    return found


def test_the_page_is_current():
    assert FILE.read_text() == page(), "run: python -m noloco_jax.config.reference > configs/FIELDS.md"


def test_every_field_has_a_row_with_its_meaning_default_and_mark():
    shown = rows(page().partition("## Defaults by method")[0])
    assert set(shown) == set(known_fields())
    for path, field in known_fields().items():
        name, default, _, meaning = shown[path]
        assert field.meaning and meaning == field.meaning, path
        assert name.endswith("*") == (on_resume(path) == "must match"), path
        assert default in ("by method", "required", f"`{field.default!r}`"), path


def test_every_method_with_defaults_is_a_column():
    text = page()
    table = text[text.index("## Defaults by method") :]
    head = re.findall(r"`(\w+)`", next(line for line in table.splitlines() if line.startswith("| field")))
    assert head == [name for name, row in METHODS.items() if row.defaults]
    for name in head:
        column = {path: cells[1 + head.index(name)] for path, cells in rows(table).items()}
        defaults = {path: f"`{value!r}`" for path, value in METHODS[name].defaults.items()}
        assert {path: cell for path, cell in column.items() if cell} == defaults
