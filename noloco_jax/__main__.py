"""List the commands: `python -m noloco_jax`."""

import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import noloco_jax
from noloco_jax.errors import UserError, main_with_errors


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each command, or with `--version` the version."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(noloco_jax.__version__)
        return
    about = _about_commands()
    if arguments and arguments[0] in about:
        raise UserError(f"{arguments[0]} is a module of its own: python -m noloco_jax.{arguments[0]}")
    if arguments not in ([], ["--help"], ["-h"]):
        raise UserError(f"unknown argument {arguments[0]!r}: python -m noloco_jax lists the commands")
    width = max(map(len, about))
    lines = [f"  python -m noloco_jax.{name:{width}}  {line}" for name, line in about.items()]
    text = "\n".join([f"noloco_jax {noloco_jax.__version__}. Each command has its own --help:", "", *lines, ""])
    sys.stdout.write(text)  # at once, so that `| head` cannot break the pipe between two lines


def _about_commands() -> dict[str, str]:
    """Map each command, `train` first, to the first line of its docstring; nothing is imported."""
    about = {}
    package = Path(__file__).parent
    for entry in (package / "train/__main__.py", *sorted(package.glob("[!_]*.py"))):
        if found := re.search(r'run_command\("noloco_jax\.([\w.]+)"\)', entry.read_text(encoding="utf-8")):
            file = package / f"{found[1].replace('.', '/')}.py"
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            about["train" if entry.stem == "__main__" else entry.stem] = docstring.partition("\n")[0]
    return about


if __name__ == "__main__":
    main_with_errors(main)
