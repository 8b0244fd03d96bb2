"""The command line of the simulations: its output, its files, and its refusals of bad input."""

import re

import pytest

from noloco_jax.config import parse_args
from noloco_jax.errors import UserError
from noloco_jax.simulate import command as simulate


def table(text: str) -> dict[str, list[str]]:
    """Map the first cells of a Markdown table to their rows."""
    rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
    return {cells[0]: cells for cells in rows if cells}


def test_costs_on_the_given_links_are_printed_as_tables(capsys):
    argv = "--params=1B --bandwidth=1Gbit --latency=0 --step-time=1s --replicas=8 --sync-every=10"
    simulate.main([*argv.split(), "--wire=bfloat16", "--steps=25"])
    rows = table(capsys.readouterr().out)
    # 2 GB of weights take 16 s on 1 Gbit/s, more than 10 steps of 1 s; every 10 steps that is 1.6 s a step.
    assert rows["bfloat16"][1:] == ["2 GB", "16 s", "61.5 %", "none", "16"]
    assert rows["int8"][1:] == ["1.03 GB", "8.25 s", "45.2 %", "9", "9"]
    assert rows["NoLoCo"][1:] == ["10 steps", "200 MB", "4 GB", "16 s", "1.6 s", "38.5 %", "none"]
    # An all-reduce over 8 sends 2 · 7/8 of the 4 GB in float32, which is how others send, FSDP's collectives 3 · 7/8.
    assert rows["DiLoCo"][2:6] == ["700 MB", "14 GB", "56 s", "5.6 s"]
    assert rows["DDP"][2:6] == ["7 GB", "175 GB", "56 s", "56 s"]
    assert rows["FSDP"][2:6] == ["10.5 GB", "262 GB", "84 s", "84 s"]


@pytest.mark.parametrize(
    ("sync_every", "words", "flags"),
    [
        (50, "fits the link: an exchange takes 32 s, and outer.delay=32", "sync_every=50 float32 delay=32"),
        (10, "does not fit the link: an exchange takes 32 s, and the 10 steps", "sync_every=10 int8 delay=9"),
        (1, "does not fit the link", "sync_every=5 modulo4 delay=5"),
    ],
)
def test_the_answer_comes_first_as_flags_that_the_trainer_takes(sync_every, words, flags, capsys):
    argv = "--params=1B --bandwidth=1Gbit --latency=0 --step-time=1s --replicas=8"
    simulate.main([*argv.split(), f"--sync-every={sync_every}"])
    setting, answer, command, *_ = capsys.readouterr().out.split("\n\n")
    assert setting.startswith("1B parameters, 8 replicas, 1 Gbit/s")
    assert words in answer
    config, _ = parse_args(["--config=configs/quickstart.py", *command.split()], "", lambda _: None)
    outer = config.outer
    assert f"sync_every={outer.sync_every} {outer.wire} delay={outer.delay}" == flags


def test_the_papers_analysis_is_printed_only_on_request(capsys):
    simulate.main([])
    assert "##" not in capsys.readouterr().out


def test_the_report_and_every_picture_are_written_and_never_overwritten(tmp_path):
    out = tmp_path / "new" / "folder"
    assert simulate.main(["--analysis", f"--out={out}"]) == 0
    names = {"cost.png", "exposed.png", "latency.png", "blocking.png", "quadratic.png", "stability.png"}
    assert {p.name for p in out.iterdir()} == {"simulate.md", *names}
    assert all(p.stat().st_size > 500 for p in out.iterdir())
    assert set(re.findall(r"!\[\w+\]\((.+?)\)", (out / "simulate.md").read_text())) == names
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    with pytest.raises(UserError, match="already holds"):
        simulate.main([f"--out={out}"])
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bandwidth=100M"], "--bandwidth=100M: say whether bits or bytes"),
        (["--latency=40mm"], "unknown unit 'mm'"),
        (["--params=12X"], "unknown suffix 'X'"),
        (["--params=lots"], "write a number such as"),
        (["--step-time=0"], "greater than zero"),
        (["--replicas=1"], "--replicas=1: one replica sends nothing"),
        (["--replicas=few"], "invalid int value: 'few'"),
        (["--replicas=4", "--group-size=8"], "--group-size=8 does not fit --replicas=4"),
        (["--sync-every=0"], "--sync-every=0: must be greater than zero"),
        (["--fragments=0"], "--fragments=0: must be greater than zero"),
        (["--steps=0"], "--steps=0: must be greater than zero"),
        (["--delay=-1"], "--delay=-1: must be zero or greater"),
        (["--delay=11", "--sync-every=10"], "--delay=11 is more than the --sync-every=10 steps"),
        (["--wire=int5"], "--wire=int5: choose one of float32, bfloat16, int8"),
        (["--wire=modulo4", "--group-size=4"], "--wire=modulo4 is for pairs and --group-size=4"),
        (["--step-spread=1", "--delay=2"], "leave it out, or --fragments and --delay"),
        (["--step-spread=-1"], "--step-spread=-1.0"),
        (["--replica=4"], "unknown argument '--replica=4': did you mean '--replicas'?"),
        (["--replicas=1000000", "--step-spread=1"], "--replicas=1000000 times --sync-every=50"),
    ],
)
def test_bad_input_is_refused_in_one_line_that_names_it(argv, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        simulate.main([*argv, f"--out={tmp_path / 'out'}"])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
