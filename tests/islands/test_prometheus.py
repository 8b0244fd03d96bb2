"""Metrics of islands in Prometheus' format, and the Grafana dashboard that queries them."""

import json
import re
import sys
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from noloco_jax.island.dashboard import DashboardServer
from noloco_jax.island.prometheus import METRICS, PREFIX, exposition
from noloco_jax.island.watcher import Watcher
from noloco_jax.islands.recent import Recent
from noloco_jax.islands.roster import Address
from support.paths import ROOT

PARIS = {
    "name": "paris",
    "away": "",
    "member": True,
    "status": {
        **{"round": 41, "training": True, "finished": False, "committed": 30, "due": 40, "lag": 0.25, "members": 3},
        "totals": {"met": 50, "late": 6, "alone": 9, "healed": 1, "sent": 2**40, "exposed": 1.5, "gave_way": 0.5}
        | {"starts": 2, "rounds": 70, "one_sided": 1},
        "peers": [
            {"name": "rome", "quarantined_until": 50, "refuses": ""},
            {"name": "oslo", "quarantined_until": 0, "refuses": "seed: 1 here, 2 at oslo"},
        ],
    },
    "events": [
        {"event": "figures", "step": 400, "loss": 3.5, "tokens_per_second": 1e5, "goodput": 0.9},
        {"event": "figures", "step": 410, "loss": 3.25},
        {"event": "figures", "step": 410, "perplexity": 27.5},
    ],
}
ROME = {"name": "rome", "away": "nobody listens there", "member": True, "status": None, "events": []}
RUN = {"run": "c4", "islands": [PARIS, ROME]}


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """Map (sample name without prefix, island) to its value, as Prometheus' own parser reads it."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert sample.labels["run"] == "c4"
            found[sample.name.removeprefix(PREFIX), sample.labels["island"]] = sample.value
    return found


def test_prometheus_reads_every_figure_of_an_island():
    found = samples(exposition(RUN))
    paris = {name: value for (name, island), value in found.items() if island == "paris"}
    assert paris == {
        **{"up": 1, "training": 1, "finished": 0, "round": 42, "members": 3, "lag_rounds": 0.25},
        **{"participation_ratio": 0.75, "quarantined_peers": 1, "refusing_peers": 1, "step": 410, "loss": 3.25},
        **{"perplexity": 27.5, "tokens_per_second": 1e5, "goodput_ratio": 0.9, "exchanges_met_total": 50},
        **{"exchanges_late_total": 6, "exchanges_alone_total": 9, "catch_ups_total": 1, "one_sided_total": 1},
        **{"starts_total": 2, "sent_bytes_total": 2**40, "exposed_seconds_total": 1.5, "gave_way_seconds_total": 0.5},
    }
    assert {name: value for (name, island), value in found.items() if island == "rome"} == {"up": 0}


def test_a_killed_island_exposes_no_training_gauges_and_a_removed_island_nothing():
    killed = PARIS | {"away": "nobody listens there"}
    removed = PARIS | {"name": "oslo", "member": False}
    found = samples(exposition({"run": "c4", "islands": [killed, removed]}))
    assert {island for _, island in found} == {"paris"}
    assert {name for name, _ in found if not name.endswith("_total")} == {"up", "finished"}
    assert found["up", "paris"] == 0 and found["exchanges_met_total", "paris"] == 50


def test_every_counter_metric_names_an_existing_total():
    """A counter of a total that does not exist would be missing without an error."""
    named = {metric.path[-1] for metric in METRICS if "totals" in metric.path}
    assert named <= Recent().totals.keys()


class Fixed(Watcher):
    def __init__(self):
        pass

    def to_json(self) -> dict[str, Any]:
        return RUN


@pytest.fixture
def url():
    server = DashboardServer(Address("127.0.0.1", 0), Fixed())
    server.start()
    yield f"http://{server.address}/metrics"
    server.close()


def test_the_dashboard_serves_the_metrics(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert samples(answer.read())["up", "paris"] == 1


def test_the_answer_without_prometheus_client_says_what_to_install(url, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(url, timeout=30)
    assert caught.value.code == 501 and b"pip install prometheus-client" in caught.value.read()
    caught.value.close()


def grafana() -> dict[str, Any]:
    return json.loads((ROOT / "launch" / "grafana.json").read_text())


def test_grafanas_queries_name_only_existing_metrics_and_omit_only_the_listed_ones():
    names = {sample for sample, _ in samples(exposition(RUN))}
    asked: set[str] = set()
    queries = [target["expr"] for panel in grafana()["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in grafana()["templating"]["list"] if one["type"] == "query"]
    for query in queries:
        found = {name.removeprefix(PREFIX) for name in re.findall(r"\bnoloco_\w+", query)}
        assert found and found <= names, query
        asked |= found
    left_out = {
        "finished",
        "members",
        "participation_ratio",
        "refusing_peers",
        "step",
        "goodput_ratio",
        "one_sided_total",
    }
    assert names - asked == left_out


def test_grafanas_panels_do_not_overlap_and_ask_the_chosen_source():
    taken: set[tuple[int, int]] = set()
    for panel in grafana()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
        assert all('run="$run"' in target["expr"] for target in panel["targets"])
