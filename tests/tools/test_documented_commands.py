"""Commands of the READMEs, run in order as a page's reader would, with a small model; links and names of all pages."""

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from noloco_jax.config.fields import TrainConfig
from noloco_jax.config.schema import field_at
from support.data_makers import write_c4
from support.paths import ROOT, TOOLS
from support.readmes import PAGES, READMES
from support.texts import lines_of_words

MODEL = [
    *(f"--config.model.{name}" for name in ("hidden_size=16", "intermediate_size=32", "num_layers=1")),
    *(f"--config.model.{name}" for name in ("num_heads=2", "num_kv_heads=2", "vocab_size=512")),
]
DATA = [
    *("--config.data.path=c4/en", "--config.data.validation_path=", "--config.data.tokenizer=byte"),
    *("--config.data.sequence_length=16", "--config.data.batch_size=1", "--config.data.shuffle_buffer=4"),
]
RUN = [
    "--config.eval_batches=1",
    "--config.num_replicas=2",
    "--config.mesh.replica=1",
    "--config.num_steps=2",
    "--config.num_microbatches=1",
    "--config.inner.warmup_steps=1",
]
# Flags added to a tool's commands: the last value of a flag counts.
ADDED = {
    "tokenize": ["--workers=0"],
    "train": [*MODEL, *DATA, *RUN],
    "island keys": [],
    "compare": ["--dry_run", *DATA],
    "simulate": [],
    "export": [],
    "evaluate": ["--tokens=100"],
    "generate": ["--max_new_tokens=2"],
    "island train": ["--dry_run", *MODEL, *DATA],
}
DRY = ["--config.data.path=c4/en", "--config.data.tokenizer=byte", "--workdir=runs/dry"]  # the page's model, small data
# Tools whose commands take minutes, set the number of devices or need peers, and the tests that run them.
ELSEWHERE = {
    "communication": "communication/test_report.py",
    "network": "network/test_command.py",
    "bench": "bench/test_command.py",
    "island status": "islands/test_status.py",
    "island merge": "islands/test_merge.py",
    "island dashboard": "islands/test_status.py",
    "island invite": "islands/test_members.py",
    "island remove": "islands/test_members.py",
}
ROSTER = """
run = "two"

[[island]]
name = "paris"
address = "127.0.0.1:7070"

[[island]]
name = "berlin"
address = "127.0.0.1:7071"
"""


class Command(NamedTuple):
    """Command of a page; `printed` are the lines that the page shows below it."""

    page: str
    tool: str
    arguments: list[str]
    printed: Sequence[str]


def documented() -> list[Command]:
    """Return every `python -m noloco_jax.TOOL` in a block of a README, except those with dots for a value."""
    found = []
    for page in READMES:
        text = re.sub(r"\\\n\s*", " ", page.read_text())
        for match in re.finditer(r"^ {4,}(?:[A-Z_]+=\S+ )?python -m noloco_jax\.(\w+) (.*)", text, re.MULTILINE):
            module, rest = match.groups()
            if "=..." in rest:
                continue
            arguments = shlex.split(rest, comments=True)
            tool = f"{module} {arguments.pop(0)}" if module == "island" else module
            [below, *_] = re.split(r"^ {4}|^#", text[match.end() :], maxsplit=1, flags=re.MULTILINE)
            printed = "".join(re.findall(r"^```\n(.*?)^```", below, re.DOTALL | re.MULTILINE)).splitlines()
            found.append(Command(page.relative_to(ROOT).parts[-2:][0], tool, arguments, printed))
    return found


COMMANDS = [command for command in documented() if command.tool not in ELSEWHERE]
COMMANDS.sort(key=lambda command: list(ADDED).index(command.tool))  # a run before the tools that read its folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the data and the roster that the pages name."""
    path = tmp_path_factory.mktemp("documented")
    lines = lines_of_words(120)
    write_c4(path / "c4/en", [lines[:50], lines[50:100]])
    write_c4(path / "c4/en", [lines[100:]], "validation")
    (path / "roster.toml").write_text(ROSTER)
    (path / "README.md").write_text("A page to evaluate on.")
    (path / "runs").mkdir()
    (path / "runs/quickstart").symlink_to("c4")
    return path


def test_every_documented_tool_is_run_here_or_by_the_named_test():
    assert {command.tool for command in documented()} == ADDED.keys() | ELSEWHERE.keys()
    for test in ELSEWHERE.values():
        assert (ROOT / "tests" / test).exists()


class Reader:
    """Runs the pages' commands in order, each once; a test of one command runs those before it too."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.results: list[tuple[int | Exception, str]] = []

    def result_of(self, position: int) -> tuple[int | Exception, str]:
        """Return a command's exit status, or what it raised, and its standard output."""
        for command in COMMANDS[len(self.results) : position + 1]:
            with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()) as output:
                try:
                    status = run(command)
                except Exception as error:  # shown by this command's test
                    status = error
            self.results.append((status, output.getvalue()))
        return self.results[position]


def run(command: Command) -> int:
    added = DRY if "--dry_run" in command.arguments else ADDED[command.tool]
    if "--config.data.kind=parquet" in command.arguments:  # what `tokenize` has written
        added = [flag for flag in added if not flag.startswith("--config.data.path=")]
    module, *subcommand = command.tool.split()
    entry = ROOT / f"noloco_jax/{module}.py"
    entry = entry if entry.exists() else ROOT / f"noloco_jax/{module}/__main__.py"
    [name] = re.findall(r'run_command\("([\w.]+)"\)', entry.read_text())
    main = importlib.import_module(name).main
    return main([*subcommand, *command.arguments, *added])


@pytest.fixture(scope="module")
def reader(folder) -> Reader:
    return Reader(folder)


@pytest.mark.filterwarnings("ignore:the run is estimated at")  # of a dry run for larger machines
@pytest.mark.filterwarnings("ignore:.* a checkpoint takes about")
@pytest.mark.parametrize("position", range(len(COMMANDS)), ids=[f"{one.page}-{one.tool}" for one in COMMANDS])
def test_a_documented_command_runs(reader, position):
    status, output = reader.result_of(position)
    assert not status, output
    for line in COMMANDS[position].printed:
        assert line in output


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
        "config.reference",
    }
    for file in re.findall(r"\b(?:launch|configs)/\w+\.(?:sh|py|yaml|sbatch|png)", text):
        assert (ROOT / file).exists(), file
    for path in re.findall(r"--config\.([a-z_.]+)", text):
        assert path.startswith("data.mixture.") or field_at(TrainConfig, path), path
    for path in re.findall(r"\b((?:outer|inner|data|mesh|model)\.[a-z_]+)=", text):
        assert field_at(TrainConfig, path), path
