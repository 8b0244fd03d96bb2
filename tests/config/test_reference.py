"""The page of all fields, `configs/FIELDS.md`."""

import contextlib
import dataclasses
import io
import re
from pathlib import Path

import pytest

import noloco_jax.config
from noloco_jax.config import TrainConfig, known_fields
from noloco_jax.config.reference import page
from noloco_jax.config.schema import fields_of
from noloco_jax.methods import METHODS
from noloco_jax.train.command import main

FILE = Path(noloco_jax.config.__file__).parents[2] / "configs" / "FIELDS.md"


def rows(text: str) -> dict[str, list[str]]:
    """Map each field to the cells of its first row, the field's own included."""
    cells = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `"): [cell.strip() for cell in row] for row in reversed(cells)}


def groups(cls: type) -> list[type]:
    inside = [info.type for info in fields_of(cls).values() if info.is_group]
    return [cls, *(group for one in inside for group in groups(one))]


def test_the_page_is_current():
    assert FILE.read_text() == page(), "run: python -m noloco_jax.config.reference > configs/FIELDS.md"


def test_a_changed_default_changes_the_page(monkeypatch):
    info = dataclasses.replace(fields_of(TrainConfig)["log_every"], default=11)
    monkeypatch.setattr("noloco_jax.config.reference.fields_of", lambda cls: {**fields_of(cls), "log_every": info})
    assert "| `log_every` | int | `11` |" in page()


def test_every_field_has_a_row_with_its_meaning():
    shown = rows(FILE.read_text())
    for path, field in known_fields().items():
        assert field.meaning and shown[path][-1] == field.meaning, path


def test_every_method_is_a_column_with_its_defaults():
    text = FILE.read_text()
    table = text[text.index("## Defaults by method") :]
    head = re.findall(r"`(\w+)`", next(line for line in table.splitlines() if line.startswith("| field")))
    assert head == list(METHODS)
    for name, row in METHODS.items():
        column = {path: cells[1 + head.index(name)] for path, cells in rows(table).items()}
        assert {path: cell for path, cell in column.items() if cell} == {
            f"outer.{path}": f"`{value!r}`" for path, value in row.defaults.items()
        }


def test_meanings_are_noun_phrases_or_imperatives():
    texts = [field.meaning for field in known_fields().values()]
    texts += [str(group.__doc__) for group in groups(TrainConfig)]
    for text in texts:
        assert not re.match(r"(What|Whether|Which|Who|Whose|How|Of|As|To|After|Where|When)\b", text), text


def test_the_help_of_training_names_the_page():
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
        main(["--help"])
    assert "configs/FIELDS.md" in output.getvalue()
