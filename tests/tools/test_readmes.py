"""Pages: links resolve, and commands name existing tools, files and fields."""

import re

import pytest

from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import field_at
from support.paths import ROOT, TOOLS
from support.readmes import PAGES

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_every_relative_link_resolves(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@every_page
def test_commands_name_tools_files_and_fields_that_exist(page):
    text = page.read_text()
    examples = {f"examples.{path.stem}" for path in (ROOT / "noloco_jax/examples").glob("[!_]*.py")}
    assert set(re.findall(r"python -m noloco_jax\.([a-z]+(?:\.[a-z]+)?)", text)) <= {
        *TOOLS,
        *examples,
        *("bench.exogym", "config.reference"),
    }
    for file in re.findall(r"\b(?:launch|configs)/\w+\.(?:sh|py|yaml|sbatch|png)", text):
        assert (ROOT / file).exists(), file
    for path in re.findall(r"--config\.([a-z_.]+)", text):
        assert path.startswith("data.mixture.") or field_at(TrainConfig, path), path
    for path in re.findall(r"\b((?:outer|inner|data|mesh|model)\.[a-z_]+)=", text):
        assert field_at(TrainConfig, path), path
