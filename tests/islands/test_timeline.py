"""Figures and timelines of islands, computed from made-up logs."""

import itertools
import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from noloco_jax.errors import UserError
from noloco_jax.island.report import Row, draw_islands, draw_on, report_table
from noloco_jax.island.timeline import Link, died, figures_of, links_of, timeline_of
from noloco_jax.islands import log
from noloco_jax.islands.agent import Met
from noloco_jax.islands.log import LOG_FILE, History, IslandLog, read_log


def start(time: float, name: str) -> dict[str, Any]:
    return {"time": time, "event": "start", "name": name, "step": 0}


def tick(time: float, round: int) -> dict[str, Any]:
    seconds = {"gave_way": 0.25, "exposed": 0.5}
    return {"time": time, "event": "round", "round": round, "step": 10 * (round + 1), **seconds}


def exchange(time: float, round: int, partner: str, outcome: str, lag: int = 0, sent: int = 0) -> dict[str, Any]:
    values = {"round": round, "partner": partner, "outcome": outcome, "lag": lag, "sent": sent}
    steps = None if outcome in ("alone", "healed") else 10 * lag + 2
    return {"time": time, "event": "exchange", "steps_late": steps, "reason": "", "one_sided": False, **values}


def end(time: float) -> dict[str, Any]:
    return {"time": time, "event": "end", "finished": True}


def history(name: str, *events: Iterable[dict[str, Any]]) -> History:
    return History(name, sorted(itertools.chain(*events), key=lambda event: event["time"]))


# paris trains from 0 to 100 s and ends a round every 10 s; rome 1 s later each; oslo is killed at about 35 s, resumes
# at 60 s from a checkpoint after round 1, and catches up with the state of paris after round 6.
PARIS = history(
    "paris",
    [start(0.0, "paris"), end(101.0)],
    [tick(10.0 * (r + 1), r) for r in range(10)],
    [exchange(11.5, 0, "rome", "met", sent=500), exchange(22.0, 1, "", "alone")],
    [exchange(42.0, 2, "rome", "late", lag=1, sent=500), exchange(60.5, 3, "oslo", "alone")],
)
ROME = history(
    "rome",
    [start(0.5, "rome"), end(103.0)],
    [tick(10.0 * (r + 1) + 1, r) for r in range(10)],
    [exchange(11.6, 0, "paris", "met", sent=500), exchange(41.9, 2, "paris", "met", sent=500)],
    [exchange(22.0, 1, "oslo", "met", sent=500)],
)
OSLO = history(
    "oslo",
    [start(0.2, "oslo"), start(60.0, "oslo")],
    [tick(time, r) for time, r in ((10.5, 0), (20.5, 1), (30.5, 2), (62.0, 2), (64.0, 3), (80.0, 7), (90.0, 8))],
    [exchange(21.8, 1, "rome", "met", sent=500), exchange(70.0, 6, "paris", "healed")],
)


def test_each_exchange_is_one_link_between_both_ends_of_its_round():
    assert sorted(links_of([PARIS, ROME, OSLO])) == [
        Link("oslo", 20.5, "rome", 21.0, late=False),
        Link("paris", 10.0, "rome", 11.0, late=False),
        Link("paris", 30.0, "rome", 31.0, late=True),
    ]
    assert len(links_of([PARIS, OSLO])) == 0  # rome has no row to link to


def test_an_exchange_links_the_latest_ends_of_its_round_before_it():
    again = history("oslo", OSLO.events, [exchange(32.0, 2, "rome", "met"), exchange(63.0, 2, "rome", "met")])
    rome = history("rome", ROME.events, [tick(62.5, 2)])
    links = links_of([again, rome])
    assert Link("oslo", 62.0, "rome", 62.5, late=False) in links
    assert Link("oslo", 30.5, "rome", 31.0, late=False) in links


def test_figures_cover_all_starts_of_an_island():
    assert figures_of(PARIS) == (10, 2, 9, 7.0, 1000, 1, 0, 2.5, 5.0, 100.0)
    assert figures_of(ROME) == (10, 3, 10, 2.0, 1500, 1, 0, 2.5, 5.0, 100.5)
    # The message of round 2 was sent twice; oslo was away from 30.5 s to 60 s.
    assert figures_of(OSLO) == (9, 1, 7, 2.0, 500, 2, 1, 1.75, 3.5, pytest.approx(30.3 + 30.0))
    healed_alone = history("oslo", [start(0.0, "oslo"), exchange(5.0, 6, "paris", "healed")])
    assert figures_of(healed_alone).rounds == 7  # rounds of training in the weights
    assert figures_of(healed_alone).steps_late is None


def test_a_timeline_lists_deaths_healings_and_rounds_alone():
    paris, oslo = timeline_of(PARIS), timeline_of(OSLO)
    assert paris.alone == [40.0]  # round 3; round 1 had no partner
    assert [life[:2] for life in oslo.lives] == [(0.2, 30.5), (60.0, 90.0)]
    assert oslo.healings == [(70.0, "paris")]
    assert [died(life, oslo, 103.0) for life in oslo.lives] == [True, False]
    assert died(oslo.lives[1], oslo, 103.0 + 500)  # silent for too long to be between two rounds
    assert [died(life, paris, 999.0) for life in paris.lives] == [False]


def test_the_picture_draws_every_tick_and_link_at_its_time_and_row():
    axes = Figure().subplots()
    draw_on(axes, [PARIS, ROME, OSLO])
    drawn = {collection.get_label(): collection.get_segments() for collection in axes.collections}  # type: ignore[attr-defined]
    middles = sorted(tuple(segment.mean(axis=0).tolist()) for segment in drawn["end of a round"])
    rounds = [
        (event["time"], row)
        for row, one in enumerate((PARIS, ROME, OSLO))
        for event in one.events
        if event["event"] == "round"
    ]
    np.testing.assert_allclose(middles, sorted(rounds))
    assert sorted(segment.tolist() for segment in drawn["exchange"]) == [[[10.0, 0], [11.0, 1]], [[20.5, 2], [21.0, 1]]]
    assert [segment.tolist() for segment in drawn["exchange, late for one"]] == [[[30.0, 0], [31.0, 1]]]
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}  # type: ignore[union-attr]
    assert points["killed or failed"] == [[30.5, 2]]
    assert points["caught up: weights of another"] == [[70.0, 2]]
    assert points["round alone"] == [[40.0, 0]]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["paris", "rome", "oslo"]


def test_a_picture_is_drawn_of_no_rounds_and_of_very_many(tmp_path):
    dice = random.Random(0)
    many = [
        history(
            f"i{i}",
            [start(0.0, f"i{i}")],
            [tick(r + dice.random(), r) for r in range(2000)],
            [exchange(r + 1.5, r, f"i{i ^ 1}", "met") for r in range(2000)],
        )
        for i in range(4)
    ]
    for histories in ([history("paris", [start(5.0, "paris")])], many):
        path = draw_islands(histories, tmp_path / "islands.png")
        assert path.read_bytes().startswith(b"\x89PNG")


def test_a_log_continues_after_a_process_killed_in_the_middle_of_a_line(tmp_path):
    IslandLog(tmp_path, "paris").start(0, 0.0)
    IslandLog(tmp_path, "paris").round(0, 10, 0.0, 0.0)
    with (tmp_path / LOG_FILE).open("a") as file:
        file.write('{"time": 1.0, "eve')
    assert [event["event"] for event in read_log(tmp_path).events] == ["start", "round"]  # while it is being written
    IslandLog(tmp_path, "paris").exchange(Met(0, "rome", "met"), 300)
    log = read_log(tmp_path)
    assert log.name == "paris"
    assert [event["event"] for event in log.events] == ["start", "round", "exchange"]
    assert figures_of(log).sent == 300


def test_a_round_is_logged_with_only_its_own_lost_seconds(tmp_path):
    log = IslandLog(tmp_path, "paris")
    log.start(0, 0.0)
    for number, gave_way in enumerate((2.0, 2.0, 5.0)):
        log.round(number, 10 * (number + 1), gave_way, 2 * gave_way)
    rounds = read_log(tmp_path).events[1:]
    assert [(event["gave_way"], event["exposed"]) for event in rounds] == [(2.0, 4.0), (0.0, 0.0), (3.0, 6.0)]


def test_the_report_shows_the_exposed_share_only_if_the_log_has_it():
    def title(history: History) -> str:
        return str(report_table([Row(history, None)]).title)

    assert "training stood still for exchanges for 5 %, paused 2 s" in title(PARIS)
    former = [{name: value for name, value in tick(10.0, 0).items() if name != "exposed"}]
    assert "stood still" not in title(history("paris", [start(0.0, "paris")], former))


def test_goodput_is_the_trained_share_of_the_time_since_the_first_start(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(log, "event_time", lambda: now)
    first = IslandLog(tmp_path, "paris")
    first.start(0, 20.0)  # 20 s of training come from an earlier run as one program
    now = 1010.0
    assert first.goodput(28.0) == pytest.approx(0.8)
    now = 1100.0  # killed, and resumed from a checkpoint after 25 s
    second = IslandLog(tmp_path, "paris")
    second.start(10, 25.0)
    now = 1120.0
    assert second.goodput(45.0) == pytest.approx(25.0 / 120.0)


def test_a_clock_that_is_set_during_a_run_moves_no_event(tmp_path, monkeypatch):
    clock = time.time
    written = IslandLog(tmp_path, "paris")
    written.start(0, 0.0)
    for hours in (2, -3):
        monkeypatch.setattr(time, "time", lambda hours=hours: clock() + 3600 * hours)
        written.round(0, 10, 0.0, 0.0)
    times = [event["time"] for event in read_log(tmp_path).events]
    assert times == sorted(times) and times[-1] - times[0] < 60


def test_one_sided_exchanges_are_counted_over_all_processes(tmp_path):
    first = IslandLog(tmp_path, "paris")
    first.start(0, 0.0)
    first.exchange(Met(0, "rome", "alone", one_sided=True), 0)
    first.exchange(Met(1, "rome", "met"), 300)
    assert first.one_sided == 1
    second = IslandLog(tmp_path, "paris")
    second.exchange(Met(2, "rome", "alone", one_sided=True), 0)
    assert second.one_sided == 2


def test_a_folder_without_a_valid_log_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"island\.jsonl is not there: give the --workdir of an island"):
        read_log(tmp_path)
    for content in ('{"event": "round"}\n', "[]\n", "nothing\n"):
        Path(tmp_path / LOG_FILE).write_text(content)
        with pytest.raises(UserError, match=r"holds no start|is no event of an island"):
            read_log(tmp_path)
    Path(tmp_path / LOG_FILE).write_text(json.dumps(start(0.0, "rome")) + "\n")
    assert read_log(tmp_path).name == "rome"
