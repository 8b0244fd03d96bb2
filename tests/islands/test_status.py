"""Status, dashboard and metrics of islands: what they show of training, frozen, absent and restarted ones."""

import json
import math
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from noloco_jax.errors import UserError
from noloco_jax.islands import messages_pb2 as pb
from noloco_jax.islands.ask import open_run
from noloco_jax.islands.command import main as island
from noloco_jax.islands.dashboard import COUNTERS, GAUGES, PREFIX, STATE, DashboardServer, exposition
from noloco_jax.islands.roster import Address
from noloco_jax.islands.watcher import Watcher
from support.live_island import LiveIsland, training, wait_for
from support.rosters import on_loopback, with_keys
from support.training_islands import begin_without

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Iterator[Path]:
    """Train two islands of a roster of three, whose third never comes."""
    folder = tmp_path_factory.mktemp("seen")
    roster, keys = with_keys(on_loopback("paris", "berlin", "vienna"), folder)
    with pytest.MonkeyPatch.context() as patch:
        begin_without(patch, "vienna")
        islands = [LiveIsland(name, roster, folder, keys / name) for name in ("paris", "berlin")]
        with training(*islands):
            wait_for(lambda: all(one.round > 3 for one in islands))
            islands[0].link.record({"loss": 2.5, "perplexity": 12.0, "tokens_per_second": math.inf})
            yield folder


@pytest.fixture(scope="module")
def served(run) -> Iterator[tuple[DashboardServer, Watcher]]:
    watcher = Watcher(open_run(run / "roster.toml", run / "keys" / "berlin"), every=0.5)
    server = DashboardServer(Address("127.0.0.1", 0), watcher)
    watcher.start()
    server.start()
    wait_for(lambda: [one["state"] for one in watcher.to_json()["islands"].values()].count("training") == 2)
    yield server, watcher
    server.close()
    watcher.close()


def get(server: DashboardServer, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://{server.address}{path}", timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("keys", ["keys", "keys/berlin"])
def test_the_status_command_shows_who_trains_and_why_others_are_away(run, keys, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert island(["status", f"--roster={run / 'roster.toml'}", f"--keys={run / keys}"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"paris .*training", said) and re.search(r"berlin .*training", said)
    assert re.search(r"vienna.*away: nobody", said)
    assert "run test" in said and "2 of 3 islands train, 1 away" in said and "behind" not in said


def test_the_page_has_the_figures_of_every_island(served):
    server, _ = served
    status, content = get(server, "/data.json")
    islands = json.loads(content)["islands"]
    assert status == 200 and islands.keys() == {"paris", "berlin", "vienna"}
    assert islands["paris"]["state"] == "training" and islands["paris"]["figures"] == {"loss": 2.5, "perplexity": 12.0}
    assert islands["vienna"]["away"] == "nobody listens there"
    wait_for(lambda: any(json.loads(get(server, "/history.json")[1])["islands"].get("paris", {}).get("round", ())))
    assert get(server, "/")[1].startswith(b"<!doctype html>")
    assert get(server, "/../roster.toml")[0] == get(server, "/nothing")[0] == 404


def test_metrics_are_in_prometheus_format_with_all_islands(served):
    server, _ = served
    families = {one.name: one for one in text_string_to_metric_families(get(server, "/metrics")[1].decode())}
    assert families.keys() == {PREFIX + name for name in (*GAUGES, *COUNTERS, STATE)}
    values = {sample.labels["island"]: sample.value for sample in families[PREFIX + "up"].samples}
    assert values == {"paris": 1.0, "berlin": 1.0, "vienna": 0.0}
    states = {sample.labels["island"]: sample.labels["state"] for sample in families[PREFIX + STATE].samples}
    assert states == {"paris": "training", "berlin": "training", "vienna": "away"}
    assert {sample.labels["island"] for sample in families[PREFIX + "training"].samples} == {"paris", "berlin"}


@pytest.mark.skipif(BROWSER is None, reason="no headless browser here: apt-get install chromium")
def test_a_browser_draws_the_page(served, tmp_path):
    server, _ = served
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    command += ["--disable-background-networking", f"--user-data-dir={tmp_path}", "--virtual-time-budget=8000"]
    done = subprocess.run([*command, "--dump-dom", f"http://{server.address}/"], capture_output=True, text=True)
    assert "Uncaught" not in done.stderr
    assert ">test</span></h1>" in done.stdout.replace(' id="run"', "")
    assert "2 of 3 islands train, 1 away" in done.stdout and "away: nobody listens there" in done.stdout
    assert done.stdout.count("<path") >= 2  # rounds of both
    for label in ("rounds ended", "nats per token", "time of day"):
        assert f">{label}</text>" in done.stdout
    legend = re.search(r'<p class="key">(.*?)</p>', done.stdout)
    assert legend is not None and re.findall(r"</i>(\w+)", legend[1]) == ["paris", "berlin", "vienna"]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_no_line_is_drawn_across_missing_data():
    page = (Path(__file__).parents[2] / "noloco_jax/islands/page.html").read_text()
    found = re.search(r"function stretches.*?\n}\n", page, re.DOTALL)
    assert found is not None
    times, values = [0, 2, 4, 6, 60, 62], [2.0, 1.9, None, 1.7, 1.6, None]
    program = f"{found.group()} console.log(JSON.stringify(stretches({json.dumps(times)}, {json.dumps(values)}, 10)))"
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[[0, 2], [2, 1.9]], [[6, 1.7]], [[60, 1.6]]]


def test_islands_that_end_keep_their_last_word_on_page_and_in_metrics_and_in_the_status_command(tmp_path, capsys):
    path, keys = with_keys(on_loopback("paris", "berlin", "rome", run="ends"), tmp_path)
    paris, berlin, _ = islands = [LiveIsland(name, path, tmp_path, keys / name) for name in ("paris", "berlin", "rome")]
    watcher = Watcher(open_run(path, keys), every=0.2)

    def states() -> list[str]:
        return [one["state"] for one in watcher.to_json()["islands"].values()]

    with training(*islands):
        watcher.start()
        wait_for(lambda: states() == ["training"] * 3)
        for one, phase in ((paris, pb.Status.FINISHED), (berlin, pb.Status.LEAVING)):
            one.link.leave(phase)
            one.stopping.set()
            one.join()  # its process ends at once, between two questions
        wait_for(lambda: states() == ["finished", "left", "training"])
        wait_for(lambda: not any(one["answers"] for one in list(watcher.to_json()["islands"].values())[:2]))
        metrics = text_string_to_metric_families(exposition(watcher.to_json()).decode())
        up = next(family for family in metrics if family.name == PREFIX + "up")
        assert {sample.labels["island"]: sample.value for sample in up.samples} == {"rome": 1.0}
        assert island(["status", f"--roster={path}", f"--keys={keys}"]) == 0  # which asks rome about the others
        assert re.search(r"paris .*finished.*\n.*berlin .*left.*\n.*rome .*training", capsys.readouterr().out)
    watcher.close()


def test_loops_of_users_are_not_merged_by_the_command(run):
    with pytest.raises(UserError, match=r"(paris|berlin) is a loop of your own"):
        island(["merge", "--out=never", f"--roster={run / 'roster.toml'}", f"--keys={run / 'keys'}"])


def test_a_port_in_use_is_named(served):
    server, watcher = served
    with pytest.raises(UserError, match="give another --listen"):
        DashboardServer(server.address, watcher)


def test_keys_are_asked_for_where_an_island_is_on_another_machine(tmp_path):
    text = 'run = "r"\n[[island]]\nname = "a"\naddress = "10.0.0.1:1"\n[[island]]\nname = "b"\naddress = "10.0.0.2:1"\n'
    (tmp_path / "roster.toml").write_text(text)
    with pytest.raises(UserError, match="give --keys=FOLDER"):
        open_run(tmp_path / "roster.toml", None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no keys"):
        open_run(tmp_path / "roster.toml", tmp_path / "empty")
