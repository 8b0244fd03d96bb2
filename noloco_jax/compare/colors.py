"""How the variants are told apart in pictures: the same in all of them."""

from collections.abc import Sequence

from noloco_jax.compare.rows import Row

_METHODS = {
    "ddp": "#6b7280",
    "diloco": "#d95f02",
    "noloco": "#1b7837",
    "local": "#7b5ea7",
    "epidemic": "#1f78b4",
    "sparseloco": "#b8860b",
}
_OTHERS = ("#e7298a", "#b2182b", "#c59b08", "#1c9ba0", "#c51b8a", "#8c510a", "#4d4d4d", "#7fbc41", "#6a3d9a", "#f4a582")
_DASHES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "v")


def styles(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """(color, dash, mark) of each row: a color a variant, methods that go by their own name always the same one, and a
    dash and a mark a value of the varied field."""
    named = [title for title in dict.fromkeys(row.variant.title for row in rows) if title not in _METHODS]
    colors = _METHODS | {title: _OTHERS[i % len(_OTHERS)] for i, title in enumerate(named)}
    values = list(dict.fromkeys(row.variant.value for row in rows if row.variant.value is not None))

    def place(row: Row) -> int:
        return 0 if row.variant.value is None else values.index(row.variant.value)

    return [
        (colors[row.variant.title], _DASHES[place(row) % len(_DASHES)], _MARKS[place(row) % len(_MARKS)])
        for row in rows
    ]
