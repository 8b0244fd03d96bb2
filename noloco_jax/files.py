"""Files that are there whole or not at all."""

import os
from pathlib import Path


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
