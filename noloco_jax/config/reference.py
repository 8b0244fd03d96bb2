"""The page `configs/FIELDS.md`: a table for each group of fields, made from `fields.py` and `methods.py`.

`python -m noloco_jax.config.reference > configs/FIELDS.md` writes it again after a field or a default has changed.
"""

import dataclasses
import inspect
from collections.abc import Iterator, Sequence

from noloco_jax.config.changes import FREE, on_resume
from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import LARGEST_INT, NAME, FieldInfo, fields_of
from noloco_jax.optim.methods import METHOD_FIELDS, METHODS

_HEAD = f"""# Fields of the configuration

Made by `python -m noloco_jax.config.reference > configs/FIELDS.md`; edit `noloco_jax/config/fields.py` instead.

`config.outer.sync_every = 25` in a config file or the flag `--config.outer.sync_every=25` sets a field. Numbers are
finite, integers at most {LARGEST_INT}. A resume refuses other values of fields marked \\*. It prints other changes,
except of {", ".join(f"`{path}`" for path in FREE)}."""


def page() -> str:
    """Return the page as Markdown."""
    root = FieldInfo(TrainConfig, optional=False, default=dataclasses.MISSING)
    return "\n\n".join([_HEAD, *_sections("", root), _methods()]) + "\n"


def _sections(path: str, group: FieldInfo) -> Iterator[str]:
    """Yield a section with the fields of the group at a dotted path, then those of the groups in it."""
    infos = {f"{path}.{name}".lstrip("."): info for name, info in fields_of(group.type).items()}
    rows = [_row(inside, info) for inside, info in infos.items() if not info.is_group]
    meaning = inspect.cleandoc(group.type.__doc__ or "") + (" None by default." if group.optional else "")
    table = _table(["field", "default", "values", "meaning"], rows)
    yield f"## {f'`{path}`' if path else 'Top level'}\n\n{meaning}\n\n{table}"
    for inside, info in infos.items():
        if info.is_group:
            yield from _sections(f"{inside}.{NAME}" if info.by_name else inside, info)


def _row(path: str, info: FieldInfo) -> list[str]:
    default = "required" if info.default is dataclasses.MISSING else f"`{info.default!r}`"
    if path.startswith("outer.") and path.removeprefix("outer.") in METHOD_FIELDS:
        default, info = "by method", dataclasses.replace(info, optional=False)
    mark = "\\*" if on_resume(path) == "must match" else ""
    return [f"`{path.rpartition('.')[2]}`{mark}", default, info.values.removeprefix("a "), info.meaning]


def _methods() -> str:
    """Return the section with each method's defaults."""
    rows = {name: row.defaults for name, row in METHODS.items() if row.defaults}
    cells = [
        [f"`{field}`", *(f"`{own[field]!r}`" if field in own else "" for own in rows.values())]
        for field in METHOD_FIELDS
    ]
    table = _table(["field", *(f"`{name}`" for name in rows)], cells)
    return f"## Defaults by method\n\nA method uses those of these fields of `outer` that have a default.\n\n{table}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    print(page(), end="")
