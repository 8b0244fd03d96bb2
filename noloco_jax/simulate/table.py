"""Tables of the report."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up in a terminal too; all but the first are right-aligned."""
    widths = [max(len(cells[i]) for cells in (header, *rows)) for i in range(len(header))]
    sides = "<" + ">" * (len(header) - 1)
    lines = [
        " | ".join(f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True))
        for cells in (header, *rows)
    ]
    rule = " | ".join(
        "-" * width if side == "<" else "-" * (width - 1) + ":" for side, width in zip(sides, widths, strict=True)
    )
    return "\n".join(f"| {line} |" for line in (lines[0], rule, *lines[1:]))
