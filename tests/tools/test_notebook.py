"""The notebook runs from its first cell to its last, on a smaller configuration than the reader's."""

import base64
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from noloco_jax.optim.methods import METHODS
from support import processes
from support.paths import ROOT

NOTEBOOK = ROOT / "noloco_jax/examples/quickstart.ipynb"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> list[list[nbformat.NotebookNode]]:
    """Return the outputs of each code cell, run where configs/quickstart.py is a small run."""
    folder: Path = tmp_path_factory.mktemp("notebook")
    config = processes.write_config(folder)
    (folder / "configs").mkdir()
    config.rename(folder / "configs/quickstart.py")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    source = notebook.cells[2].source
    notebook.cells[2].source = source.replace("2400, 600", "24, 24")
    assert notebook.cells[2].source != source
    source = notebook.cells[8].source
    notebook.cells[8].source = source.replace("=ddp,noloco,local", "=ddp,noloco")
    assert notebook.cells[8].source != source
    with pytest.MonkeyPatch.context() as patch:
        processes.set_environment(config, patch)
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]


def text(cell: list[nbformat.NotebookNode]) -> str:
    return "".join(output.text for output in cell if output.output_type == "stream")


def pictures(cell: list[nbformat.NotebookNode]) -> list[bytes]:
    found = (output.data.get("image/png") for output in cell if output.output_type == "display_data")
    return [base64.b64decode(picture) for picture in found if picture]


@pytest.mark.slow
def test_the_notebook_trains_draws_compares_and_writes(outputs):
    assert not any("error:" in text(cell) or "Traceback" in text(cell) for cell in outputs)
    install, train, curves, comparison, sample = outputs
    assert text(install) == ""
    assert "step 24/24  perplexity" in text(train)
    assert [len(pictures(cell)) for cell in (curves, comparison)] == [1, 1]
    assert all(len(picture) > 10_000 for cell in (curves, comparison) for picture in pictures(cell))
    assert re.findall(r"^\| (\w+) +\| +1 \|", text(comparison), re.MULTILINE) == ["ddp", "noloco"]
    assert "def " in text(sample)


def test_the_methods_that_the_notebook_compares_exist():
    [methods] = re.findall(r"--methods=(\S+)", NOTEBOOK.read_text())
    assert {*methods.split(",")} <= {*METHODS}
