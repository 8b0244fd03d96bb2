"""Metrics of a run's islands in Prometheus' format, from what a `Watcher` knows. Needs prometheus-client."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MissingError(Exception):
    """The package that writes the format is not installed."""


class Metric(NamedTuple):
    """Metric of an island.

    Attributes:
      name: without the prefix; counters get the suffix _total.
      kind: "gauge" or "counter".
      help: description with the unit.
      path: keys of the value in an island's JSON, see `values_of`.
    """

    name: str
    kind: str
    help: str
    path: tuple[str, ...]


PREFIX = "noloco_island_"
METRICS = (
    Metric("up", "gauge", "1 if the island answered the last question", ("up",)),
    Metric("training", "gauge", "1 while the island trains", ("status", "training")),
    Metric("finished", "gauge", "1 once the island has taken all steps of the run", ("status", "finished")),
    Metric("round", "gauge", "Number of rounds that the island has ended", ("rounds",)),
    Metric("members", "gauge", "Active members in its last round, as it knows them", ("status", "members")),
    Metric("lag_rounds", "gauge", "Mean rounds between a message and its correction", ("status", "lag")),
    Metric("participation_ratio", "gauge", "Share of messages with a partner that were exchanged", ("participation",)),
    Metric("quarantined_peers", "gauge", "Peers that the island takes nothing from for now", ("quarantined",)),
    Metric("refusing_peers", "gauge", "Peers that refuse the island", ("refusing",)),
    Metric("step", "gauge", "Inner steps taken, as of the last figures", ("figures", "step")),
    Metric("loss", "gauge", "Training loss in nats a token", ("figures", "loss")),
    Metric("perplexity", "gauge", "Validation perplexity of the last evaluation", ("figures", "perplexity")),
    Metric("tokens_per_second", "gauge", "Throughput of training in tokens a second", ("figures", "tokens_per_second")),
    Metric("goodput_ratio", "gauge", "Share of the time since the first start in training", ("figures", "goodput")),
    Metric("exchanges_met", "counter", "Messages exchanged in their round", ("status", "totals", "met")),
    Metric("exchanges_late", "counter", "Messages exchanged in a later round", ("status", "totals", "late")),
    Metric("exchanges_alone", "counter", "Messages whose exchange never committed", ("status", "totals", "alone")),
    Metric("catch_ups", "counter", "States taken from a donor", ("status", "totals", "healed")),
    Metric("one_sided", "counter", "Exchanges only the partner may have applied", ("status", "totals", "one_sided")),
    Metric("starts", "counter", "Processes of the island", ("status", "totals", "starts")),
    Metric("sent_bytes", "counter", "Bytes of messages that partners received", ("status", "totals", "sent")),
    Metric(
        "exposed_seconds", "counter", "Seconds that training stood still for exchanges", ("status", "totals", "exposed")
    ),
    Metric("gave_way_seconds", "counter", "Seconds of pauses for slower islands", ("status", "totals", "gave_way")),
)


def exposition(run: Mapping[str, Any]) -> bytes:
    """Return the metrics of a run, as `Watcher.to_json` describes it.

    Raises `MissingError` where prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError:
        raise MissingError(
            "metrics need the prometheus-client package, which is not installed: pip install prometheus-client"
        ) from None
    registry = CollectorRegistry()
    registry.register(_Collector(run))
    return generate_latest(registry)


def values_of(island: Mapping[str, Any]) -> dict[str, float]:
    """Return metric -> value of an island as `Watcher.to_json` describes it; what is unknown is left out.

    Of one that does not answer these are its counters, and whether it had finished.
    """
    status = island["status"] or {}
    figures: dict[str, Any] = {}
    for event in island["events"]:
        if event["event"] == "figures":
            figures |= event
    known = {**island, "status": status, "figures": figures, "up": not island["away"]}
    if status:
        peers = status["peers"]
        known["rounds"] = status["round"] + 1
        known["participation"] = status["committed"] / status["due"] if status["due"] else None
        known["quarantined"] = sum(peer["quarantined_until"] > 0 or peer.get("left_out", False) for peer in peers)
        known["refusing"] = sum(bool(peer["refuses"]) for peer in peers)
    lasting = ("up", "finished")
    told = [metric for metric in METRICS if metric.kind == "counter" or metric.name in lasting or not island["away"]]
    found = {metric.name: _at(known, metric.path) for metric in told}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(values, Mapping) or key not in values:
            return None
        values = values[key]
    return values


class _Collector:
    """Collector of all islands' metrics, with labels for run and island."""

    def __init__(self, run: Mapping[str, Any]):
        self._run = run

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        values = {island["name"]: values_of(island) for island in self._run["islands"] if island["member"]}
        for metric in METRICS:
            family = (GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily)(
                PREFIX + metric.name, metric.help, labels=("run", "island")
            )
            for name, known in values.items():
                if metric.name in known:
                    family.add_metric((self._run["run"], name), known[metric.name])
            yield family
