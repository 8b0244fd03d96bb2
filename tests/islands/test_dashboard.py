"""Dashboard of a run's islands: the data that it serves, and the page that a browser draws."""

import json
import math
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.island.dashboard import DashboardServer
from noloco_jax.island.watcher import Watched, Watcher
from noloco_jax.islands.discovery import read_run
from noloco_jax.islands.roster import Address
from support.counted import in_time
from support.paths import ROOT
from support.seen_islands import NAMES, VIEWER, Seen, seen_islands

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGE = ROOT / "noloco_jax" / "island" / "page"


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Iterator[Seen]:
    with seen_islands(tmp_path_factory.mktemp("seen")) as seen:
        yield seen


@pytest.fixture(scope="module")
def served(seen) -> Iterator[DashboardServer]:
    """Serve the page with a viewer's keys, once every island except vienna has answered."""
    watcher = Watcher(read_run(seen.roster), seen.keys / VIEWER, every=0.5)
    server = DashboardServer(Address("127.0.0.1", 0), watcher)
    watcher.start()
    server.start()
    assert in_time(lambda: [one["name"] for one in watcher.to_json()["islands"] if one["away"]] == ["vienna"])
    yield server
    server.close()
    watcher.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "localhost"])
def test_the_page_is_served_at_ipv4_and_ipv6_addresses_and_host_names(host):
    watcher = SimpleNamespace(to_json=lambda: {"islands": []})
    server = DashboardServer(Address(host, 0), watcher)  # pyright: ignore[reportArgumentType]
    server.start()
    try:
        assert get(server, "/data.json")[0] == 200
    finally:
        server.close()


def test_a_browser_that_leaves_prints_no_traceback(capfd):
    asked, left = threading.Event(), threading.Event()

    def to_json() -> dict[str, Any]:
        asked.set()
        assert left.wait(30)
        return {"islands": []}

    watcher = SimpleNamespace(to_json=to_json)
    server = DashboardServer(Address("127.0.0.1", 0), watcher)  # pyright: ignore[reportArgumentType]
    server.start()
    try:
        with socket.create_connection(server.address) as browser:
            browser.sendall(b"GET /data.json HTTP/1.1\r\n\r\n")
            assert asked.wait(30)
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closes with a reset
        left.set()
        assert in_time(lambda: not any("process_request" in thread.name for thread in threading.enumerate()))
    finally:
        server.close()
    assert capfd.readouterr().err == ""


def get(server: DashboardServer, path: str) -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(f"http://{server.address}{path}", timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read()


def islands_of(server: DashboardServer) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(get(server, "/data.json")[2])["islands"]}


def test_the_data_hold_state_and_events_of_every_island(served, seen):
    islands = islands_of(served)
    assert [*islands] == [*NAMES]
    assert {name: bool(one["away"]) for name, one in islands.items()} == {name: name == "vienna" for name in NAMES}
    for name in ("berlin", "oslo", "paris"):
        figures = [event for event in islands[name]["events"] if event["event"] == "figures"]
        assert islands[name]["status"]["totals"]["met"] > 0 and figures[-1]["loss"] > 0
        rounds = [event["round"] for event in islands[name]["events"] if event["event"] == "round"]
        assert rounds == [*range(len(rounds))]
        lines = [event["line"] for event in islands[name]["events"] if event["event"] == "notice"]
        assert "vienna was refused: seed: 1 here, 2 at vienna" in lines
    peers = [peer for name in NAMES[:-1] for peer in islands[name]["status"]["peers"] if peer["refuses"]]
    assert {(peer["name"], peer["refuses"]) for peer in peers} == {("vienna", "seed: 1 here, 2 at vienna")}


def test_a_restarted_island_is_shown_once_with_its_earlier_rounds(served):
    lisbon = islands_of(served)["lisbon"]
    assert [event["event"] for event in lisbon["events"]].count("start") == 2 == lisbon["status"]["totals"]["starts"]
    assert lisbon["status"]["totals"]["healed"] == 1
    assert next(event["partner"] for event in lisbon["events"] if event.get("outcome") == "healed") in NAMES


def event(number: int) -> dict[str, Any]:
    return {"n": number, "time": 1.0, "event": "notice"}


@pytest.mark.parametrize(
    "answer", [{"round": math.nan}, {"peers": None}, {"events": None}, {"events": [{"time": 1.0}]}, {"last": "1"}]
)
def test_an_island_with_a_malformed_answer_is_shown_as_away(answer):
    good = {"began": 1.0, "events": [event(1)], "last": 1, "round": 1, "due": 1, "committed": 1, "peers": []}
    client, watched = SimpleNamespace(peer="paris", action=lambda *_: {**good, **answer}), Watched()
    watched.ask(client, 1.0)  # pyright: ignore[reportArgumentType]
    told = watched.to_json()
    assert "unknown form" in told["away"] and told["status"] is None


def test_the_events_of_a_restarted_island_replace_those_of_its_former_process():
    class Fake:
        peer = "paris"
        began, kept = 1.0, [event(1), event(2)]

        def action(self, call: str, argument: dict[str, int], seconds: float) -> dict[str, Any]:
            after = argument["after"]
            state = {"round": 1, "due": 1, "committed": 1, "peers": []}
            return {"began": self.began, "events": self.kept[after:], "last": max(after, len(self.kept)), **state}

    fake, watched = Fake(), Watched()
    watched.ask(fake, 1.0)  # pyright: ignore[reportArgumentType]
    fake.began, fake.kept = 2.0, [event(1), event(2), event(3)]
    watched.ask(fake, 1.0)  # pyright: ignore[reportArgumentType]
    fake.kept = [*fake.kept, event(4)]
    watched.ask(fake, 1.0)  # pyright: ignore[reportArgumentType]
    assert [event["n"] for event in watched.to_json()["events"]] == [1, 2, 3, 4]


@pytest.mark.parametrize("path", ["/../dashboard.py", "/%2e%2e/dashboard.py", "/page/index.html", "/index.html/", "/x"])
def test_nothing_but_the_pages_files_is_served(served, path):
    assert get(served, path)[0] == 404


def test_only_get_is_answered(served):
    request = urllib.request.Request(f"http://{served.address}/data.json", data=b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 501
    caught.value.close()


def test_the_page_loads_only_its_own_files_and_sets_no_html():
    text = {path.name: path.read_text() for path in PAGE.iterdir()}
    assert {*text} == {"index.html", "dashboard.css", "dashboard.js"}
    assert re.findall(r"https?://[^\"' ]+", "".join(text.values())) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text["dashboard.js"])


class ParsedPage(HTMLParser):
    """Parser that collects the elements with data attributes, and the text, of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.data: list[dict[str, str | None]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name.removeprefix("data-"): value for name, value in attrs if name.startswith("data-")}
        if found:
            self.data.append(found)

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def values(self, name: str) -> list[str | None]:
        return [one[name] for one in self.data if name in one]


def opened(server: DashboardServer, folder: Path) -> ParsedPage:
    """Return the page as a headless browser has drawn it."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += ["--virtual-time-budget=6000", "--window-size=1400,1750", "--enable-logging=stderr", "--v=0"]
    command += ["--no-first-run", "--disable-background-networking", "--dump-dom", f"http://{server.address}/"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:  # Chromium itself may hang at its start on a busy machine
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr  # script errors, and violations of the content security policy
    return ParsedPage(done.stdout)


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no headless browser here: apt-get install chromium")


@needs_browser
def test_a_browser_draws_islands_exchanges_trouble_and_curves(served, tmp_path):
    page = opened(served, tmp_path)
    assert page.values("drawn") == ["true"]
    assert page.values("island") == [*NAMES]
    states = dict(zip(page.values("island"), page.values("state"), strict=True))
    assert states == {name: "away" if name == "vienna" else "training" for name in NAMES}
    assert len(page.values("link")) > 20 and {"met", "alone", "healed", "start"} <= {*page.values("outcome")}
    assert page.values("donor")[0] in NAMES and page.values("trouble").count("vienna") == 2
    assert page.values("curve").count("berlin") == 2
    text = " ".join(page.text)
    assert "5 of 6" in text and "refuse each other: " in text and "lisbon" in text and "c4-125m" in text


@needs_browser
def test_a_browser_shows_quarantines_and_their_reasons_and_renders_no_text_as_html(tmp_path):
    status = {name: 0 for name in ("round", "lag", "committed", "due")} | {"totals": {}, "partner": "", "num_steps": 8}
    peer = {"name": "rome", "quarantined_until": 40, "fault": "sent 3 broken messages in a row", "refuses": ""}
    notice = {"time": 1.0, "event": "notice", "line": "<img src=x onerror=console.log(1)>"}
    common = {"away": "", "answered": 1.0, "member": True, "address": ""}
    islands = [
        {**common, "name": "paris", "status": {**status, "training": True, "peers": [peer]}, "events": [notice]},
        {**common, "name": "rome", "status": {**status, "finished": True, "peers": []}, "events": []},
    ]

    class Fake(Watcher):
        def __init__(self):
            pass

        def to_json(self) -> dict[str, Any]:
            return {"run": "<b>", "time": 9.0, "polled": 9.0, "every": 1.0, "changes": [], "islands": islands}

    server = DashboardServer(Address("127.0.0.1", 0), Fake())
    server.start()
    try:
        page = opened(server, tmp_path)
    finally:
        server.close()
    assert page.values("state") == ["training", "finished"] and page.values("trouble") == ["rome"]
    text = " ".join(page.text)
    assert "is left out by paris until round 41: " in text and "it sent 3 broken messages in a row" in text
    assert notice["line"] in text and "<b>" in page.text


def test_the_command_serves_until_it_is_told_to_stop(seen):
    command = [sys.executable, "-m", "noloco_jax.island", "dashboard", f"--roster={seen.roster}"]
    process = subprocess.Popen(
        [*command, f"--keys={seen.keys / VIEWER}", "--listen=127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.match(r"dashboard: (http://127\.0\.0\.1:\d+)/, metrics for Prometheus: \1/metrics", line)
        assert found is not None, line
        with urllib.request.urlopen(found[1], timeout=30) as answer:
            assert answer.read() == (PAGE / "index.html").read_bytes()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("flag", "line"),
    [("--listen=nowhere", "is no address"), ("--every=0", "give 0.2 to 3600"), ("--keys=missing", "holds no keys")],
)
def test_wrong_flags_are_reported(seen, tmp_path: Path, flag, line):
    with pytest.raises(UserError, match=line):
        island(["dashboard", f"--roster={seen.roster}", f"--keys={seen.keys / VIEWER}", flag])
