"""Files that are there whole or not at all."""

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Writes a file beside `path` and renames it, so that a process killed meanwhile leaves the former file or none.

    Text is written as UTF-8. The folder is made when missing. Returns the path.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    unfinished.replace(path)
    return path


def write_picture(path: str | os.PathLike[str], figure: "Figure") -> Path:
    """Writes a figure as a PNG, in the resolution that it has, as `write_whole` does."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return write_whole(path, content.getvalue())
