"""The pages, the READMEs among them, and the Python examples in these."""

import re

from support.paths import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("[!.]*/**/*.md"))]
READMES = [page for page in PAGES if page.name == "README.md"]


def python_examples(containing: str) -> list[tuple[str, str]]:
    """Return (page, code) of every Python example in the READMEs that contains a text."""
    return [
        (str(page.relative_to(ROOT)), code)
        for page in READMES
        for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        if containing in code
    ]
