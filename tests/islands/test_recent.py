"""An island's list of its recent events."""

import json
import math
import time

from noloco_jax.islands.agent import Met
from noloco_jax.islands.log import IslandLog, earlier_events
from noloco_jax.islands.recent import _LIMIT, _LIMITS, FIGURES, Recent


def notice(number: int) -> dict:
    return {"time": float(number), "event": "notice", "line": str(number)}


def test_events_are_read_incrementally_in_order():
    recent = Recent()
    recent.add(notice(1))
    recent.add_figures(10, {"loss": 2.0})
    events, last = recent.after(0)
    assert [event["event"] for event in events] == ["notice", "figures"] and recent.after(last) == ([], last)
    recent.add(notice(2))
    assert recent.after(last)[0] == [notice(2)]


def test_each_kind_of_event_has_its_own_limit_and_keeps_the_newest():
    recent = Recent()
    recent.add_figures(1, {"loss": 1.0})
    for number in range(10 * _LIMITS["notice"]):
        recent.add(notice(number))
    for number in range(2 * _LIMIT):
        recent.add({"time": time.time(), "event": "round", "round": number, "gave_way": 0.0})
    events, _ = recent.after(0)
    kinds = [event["event"] for event in events]
    assert {kind: kinds.count(kind) for kind in kinds} == {"figures": 1, "notice": _LIMITS["notice"], "round": _LIMIT}
    assert events[-1]["round"] == 2 * _LIMIT - 1
    assert recent.totals["rounds"] == 2 * _LIMIT


def test_an_answer_stays_small_with_the_longest_events():
    recent = Recent()
    for number in range(_LIMIT):
        event = {"time": 1e9, "event": "exchange", "round": number, "partner": "p" * 63, "outcome": "alone", "lag": 0}
        recent.add({**event, "reason": "r" * 256, "one_sided": False, "sent": 0})
    for _ in range(_LIMITS["notice"]):
        recent.add({"time": 1e9, "event": "notice", "line": "l" * 400})
    for number in range(_LIMITS["figures"]):
        recent.add_figures(number, dict.fromkeys(FIGURES, 1.23456789012345678))
    assert len(json.dumps(recent.after(0))) < 1 << 20


def test_missing_non_finite_and_unlisted_figures_are_left_out():
    recent = Recent()
    recent.add_figures(1, {"loss": math.nan, "perplexity": math.inf, "tokens": None, "lr": 1.0})
    assert recent.after(0) == ([], 0)


def test_a_restart_restores_events_and_totals_from_the_log(tmp_path):
    first = Recent()
    log = IslandLog(tmp_path, "paris", first.add)
    log.start(0, 0.0)
    log.round(0, 10, 0.5, 1.0)
    log.exchange(Met(0, "rome", "met"), 300)
    log.exchange(Met(1, "", "alone"), 0)  # no partner: no failure
    second = Recent()
    for event in earlier_events(tmp_path):
        second.add(event)
    IslandLog(tmp_path, "paris", second.add).start(10, 1.0)
    assert [event["event"] for event in second.after(0)[0]] == ["start", "round", "exchange", "exchange", "start"]
    assert second.totals == {
        **{"starts": 2, "rounds": 1, "sent": 300, "gave_way": 0.5, "exposed": 1.0, "one_sided": 0},
        **{"met": 1, "late": 0, "alone": 0, "healed": 0},
    }
