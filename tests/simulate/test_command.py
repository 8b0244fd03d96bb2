"""The command line of the simulation: its answer, its tables, and its refusals of bad input."""

import re
from pathlib import Path

import pytest

from noloco_jax.config import parse_args
from noloco_jax.errors import UserError
from noloco_jax.islands import command as island
from noloco_jax.tools import simulate

LINK = "--params=1B --bandwidth=1Gbit --latency=0 --step_time=1s --replicas=8"


def table(text: str) -> dict[str, list[str]]:
    """Map the first cells of a Markdown table to their rows."""
    rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines())
    return {cells[0]: cells for cells in rows if cells}


def recommended(text: str) -> list[str]:
    return text.split("\n\n")[2].split()


def test_costs_on_the_given_links_are_printed_as_tables(capsys):
    simulate.main([*LINK.split(), "--sync_every=10", "--wire=bfloat16", "--steps=25"])
    rows = table(capsys.readouterr().out)
    # 2 GB of weights take 16 s on 1 Gbit/s, more than 10 steps of 1 s; every 10 steps that is 1.6 s a step.
    assert rows["bfloat16"][1:] == ["2 GB", "16 s", "61.5 %", "none", "16"]
    assert rows["int8"][1:] == ["1.03 GB", "8.25 s", "45.2 %", "9", "9"]
    assert rows["NoLoCo"][1:] == ["10 steps", "200 MB", "4 GB", "16 s", "1.6 s", "38.5 %"]
    # An all-reduce over 8 sends 2 · 7/8 of the 2 GB; others send float32, FSDP's collectives 3 · 7/8.
    assert rows["DiLoCo"][2:6] == ["350 MB", "7 GB", "28 s", "2.8 s"]
    assert rows["DDP"][2:6] == ["7 GB", "175 GB", "56 s", "56 s"]
    assert rows["FSDP"][2:6] == ["10.5 GB", "262 GB", "84 s", "83 s"]
    assert rows["1,024"][1:5] == ["32 s", "63.9 s", "640 s", "10"]


@pytest.mark.parametrize(
    ("sync_every", "words", "flags"),
    [
        (50, "fits the link: an exchange takes 32 s, and outer.delay=32", "sync_every=50 float32 delay=32"),
        (10, "does not fit the link: an exchange takes 32 s, and the 10 steps", "sync_every=10 int8 delay=9"),
    ],
)
def test_the_answer_comes_first_as_flags_that_the_trainer_takes(sync_every, words, flags, capsys):
    simulate.main([*LINK.split(), f"--sync_every={sync_every}"])
    text = capsys.readouterr().out
    assert text.startswith("1B parameters, 8 replicas, 1 Gbit/s")
    assert words in text.split("\n\n")[1]
    outer = parse_args(["--config=configs/quickstart.py", *recommended(text)], "", lambda _: None)[0].outer
    assert f"sync_every={outer.sync_every} {outer.wire} delay={outer.delay}" == flags


def test_a_config_file_gives_parameters_and_method_and_flags_win_over_it(capsys):
    config = ["--config=configs/quickstart.py", "--config.method=diloco", "--config.num_replicas=6"]
    simulate.main([*config, "--config.outer.sync_every=7", "--steps=70"])
    text = capsys.readouterr().out
    assert re.match(r"591k parameters, 6 replicas", text)
    assert recommended(text)[:2] == ["--config.method=diloco", "--config.outer.sync_every=7"]
    assert "every 7 steps" in text and "in 70 steps in all" in text


def test_islands_accept_what_is_recommended_to_them(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quickstart = "--config=configs/quickstart.py"
    simulate.main([quickstart, "--bandwidth=1Mbit", "--step_time=20ms", "--islands"])
    text = capsys.readouterr().out
    assert "does not fit the link" in text and "steps late" in text
    names = ["paris", "berlin", "rome", "oslo"]
    roster = [f'[[island]]\nname = "{name}"\naddress = "127.0.0.1:{7070 + i}"\n' for i, name in enumerate(names)]
    Path("roster.toml").write_text("\n".join(['run = "four"', *roster]))
    flags = [quickstart, "--roster=roster.toml", "--name=paris", "--workdir=paris", "--dry_run", *recommended(text)]
    assert not island.main(["train", *flags])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--bandwidth=100M"], "--bandwidth=100M: say whether bits or bytes"),
        (["--latency=40mm"], "unknown unit 'mm'"),
        (["--params=12X"], "unknown suffix 'X'"),
        (["--step_time=0"], "greater than zero"),
        (["--replicas=1"], "--replicas=1: one replica sends nothing"),
        (["--replicas=4", "--group_size=8"], "--group_size=8 does not fit --replicas=4"),
        (["--sync_every=0"], "--sync_every=0: must be 1 or greater"),
        (["--delay=-1"], "--delay=-1: must be 0 or greater"),
        (["--delay=11", "--sync_every=10"], "--delay=11 is more than the --sync_every=10 steps"),
        (["--wire=int5"], "--wire=int5: choose one of float32, bfloat16, int8"),
        (
            ["--wire=modulo4", "--group_size=3"],
            "--wire=modulo4 is for equal groups of 2, 4, 8, ..., not for --group_size=3",
        ),
        (
            ["--wire=modulo4", "--method=diloco"],
            "is for equal groups of 2, 4, 8, ..., not for --method=diloco: give --wire=int4",
        ),
        (["--method=ddp"], "--method=ddp has no setting to choose: give diloco or noloco"),
        (["--islands", "--delay=2"], "--delay=2 is not for --islands: give --delay=0"),
        (["--islands", "--method=diloco"], "--method=diloco is not for --islands: give --method=noloco"),
        (["--replica=4"], "unknown argument '--replica=4': did you mean '--replicas'?"),
        (["--config.seed=4"], "--config.seed=4 changes a config file: give it by --config=FILE"),
    ],
)
def test_bad_input_is_refused_in_one_line_that_names_it(argv, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        simulate.main(argv)
    assert "\n" not in str(caught.value)
