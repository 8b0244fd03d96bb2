"""`python -m noloco_jax.network` end to end, and its refusals."""

import re
from pathlib import Path

import pytest

from noloco_jax.errors import UserError
from noloco_jax.tools.network import command
from noloco_jax.tools.network.links import check_host
from support.processes import set_environment, write_config

RUN = ["--hosts=2", "--config.num_replicas=2", "--methods=noloco", "--config.eval_every=12"]


def test_pairs_on_a_slow_link_take_the_time_of_their_bytes(tmp_path: Path, monkeypatch, capsys):
    try:
        check_host()
    except UserError as error:
        pytest.skip(str(error))
    config = write_config(tmp_path / "run")
    set_environment(config, monkeypatch)
    flags = [f"--config={config}", f"--workdir={tmp_path / 'network'}", "--rates=200kbit", "--perplexity=1e9", *RUN]
    for _ in range(2):  # the second time nothing is trained
        assert command.main(flags) == 0
        table = capsys.readouterr().out
        (cells,) = ([cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines() if "| noloco" in row)
        assert cells[:2] == ["noloco", "200 kbit/s"]
        assert 0.8 < float(cells[6]) < 1.5, table
    assert (tmp_path / "network/network.png").stat().st_size > 10_000
    assert "| noloco" in (tmp_path / "network/network.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rates=20"], "--rates=20: say whether bits or bytes"),
        (["--rates=1Mbit", "--hosts=3"], "--hosts=3 does not divide num_replicas=2 of noloco"),
        (["--rates=1Mbit", "--hosts=1"], "--hosts=1: give 2 to 250 hosts"),
        (["--rates=1Mbit", "--islands", "--config.num_replicas=4"], "2 hosts for num_replicas=4 of noloco"),
        (
            ["--rates=1Mbit", "--config.eval_every=5", "--config.log_every=2"],
            "--config.eval_every=5 of noloco is no multiple",
        ),
        (["--rates=1Mbit", "--config.num_steps=8"], "--config.num_steps=8 of noloco has fewer than two lines"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(flags, message, tmp_path: Path):
    config = write_config(tmp_path / "run")
    with pytest.raises(UserError, match=re.escape(message)):
        command.main([f"--config={config}", f"--workdir={tmp_path / 'network'}", *RUN, *flags])
    assert not (tmp_path / "network").exists()
