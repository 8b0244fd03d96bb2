"""Islands cut off by the network: the others lose no exchange, and the island exchanges again once it is back."""

import threading
import time
from typing import get_args

import numpy as np
import pytest
import trustme

from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.island import Journal
from support.fault_proxy import Direction
from support.islands import keys_of
from support.rosters import on_loopback
from support.sites import Site, rosters, side_by_side

FOUR = ("berlin", "oslo", "paris", "rome")
SECONDS = 0.7  # per round
LAST = 60  # round, of islands that train until one of them has met another
AWAY = range(3, 10)  # rounds in which rome is cut off
SETTINGS = Settings(patience=6)  # rounds: 4.2 s, enough on a busy machine, yet fewer than AWAY has


@pytest.mark.parametrize("silent", [set(get_args(Direction)), {"down"}], ids=["all", "back"])
def test_a_link_silent_in_one_or_both_directions_costs_the_other_islands_nothing(silent):
    with rosters(FOUR, far="rome") as (seen, proxies):
        sites = [Site(name, seen[name], settings=SETTINGS) for name in FOUR]

        def train(rounds: int) -> None:
            side_by_side(*[lambda site=site: site.train(rounds, SECONDS) for site in sites])

        side_by_side(*[site.open for site in sites])
        train(AWAY.start)
        for proxy in proxies:
            proxy.silent |= silent
        train(len(AWAY))
        for proxy in proxies:
            proxy.silent.clear()
            proxy.reset()
        train(9)
        side_by_side(*[site.close for site in sites])
    *others, far = sites
    for site in others:
        assert site.share(without="rome") == 1, site.met
        # All these rounds together took less than the answer timeout of one call: no round waited for an answer.
        assert sum(site.seconds[round] for round in AWAY) < SETTINGS.answer_seconds
    assert far.round == AWAY.stop + 9 - 1 and not far.heals  # it kept training
    assert any(one.outcome == "alone" for one in far.met)
    assert far.share(AWAY.stop + 3) > 0.5, far.met
    for site in others:
        logged = {one.round for one in (*site.met, *far.met) if one.one_sided}
        together = {one.round for one in far.met if one.partner == site.name}
        half_applied = {round for round in together if (round in site.corrections) != (round in far.corrections)}
        assert half_applied <= logged  # those whose last header the network lost


def test_catching_up_without_a_checkpoint_yields_a_donors_recent_weights():
    ca, names = trustme.CA(), FOUR
    roster = on_loopback(*names)

    def make_site(name: str, incarnation: int = 1) -> Site:
        keys = keys_of(ca, name)
        return Site(name, roster, settings=SETTINGS, credentials=keys, incarnation=incarnation)

    *others, gone = sites = [make_site(name) for name in names]
    side_by_side(*[site.open for site in sites])
    side_by_side(*[lambda site=site: site.train(3, SECONDS) for site in sites])
    gone.agent.close()
    back = make_site("rome", incarnation=10)

    def rejoin() -> None:
        back.open()
        back.look()
        (healed,) = back.heals
        behind.append(max(site.round for site in others) - healed.round)
        recent = [site.message(healed.round - ago) for site in others for ago in range(3)]
        assert any(np.array_equal(healed.leaves[0], weights) for weights in recent)
        back.train(6, SECONDS)

    behind: list[int] = []
    side_by_side(rejoin, *[lambda site=site: site.train(8, SECONDS) for site in others])
    side_by_side(*[site.close for site in (*others, back)])
    assert behind[0] <= 1
    assert any(one.outcome != "alone" for one in back.met), back.met


def test_an_island_restarts_within_seconds_while_a_peer_is_unreachable():
    """Guard a regression: each of two rounds of requests waited the full answer timeout for the silent peer."""
    ca = trustme.CA()
    with rosters(FOUR, far="rome") as (seen, proxies):

        def site(name: str, incarnation: int = 1, journal: Journal | None = None) -> Site:
            keys = keys_of(ca, name)
            return Site(name, seen[name], settings=SETTINGS, credentials=keys, incarnation=incarnation, journal=journal)

        *others, back, far = sites = [site(name) for name in ("berlin", "oslo", "paris", "rome")]
        side_by_side(*[one.open for one in sites])
        side_by_side(*[lambda one=one: one.train(6, SECONDS) for one in sites])
        for proxy in proxies:
            proxy.silent |= set(get_args(Direction))
        saved = back.agent.take_all()[1]
        back.agent.close()
        again = site("paris", incarnation=10, journal=saved)
        started: list[float] = []
        is_over = threading.Event()

        def restart() -> None:
            try:
                began = time.monotonic()
                again.open()
                started.append(time.monotonic() - began)
                while not any(one.outcome != "alone" for one in again.met) and again.round < LAST:
                    again.train(1, SECONDS / 2)  # it begins rounds behind, and sites do not pause for one another
            finally:
                is_over.set()

        def go_on(one: Site) -> None:
            while not is_over.is_set():
                one.train(1, SECONDS)

        side_by_side(restart, *[lambda one=one: go_on(one) for one in (*others, far)])
        side_by_side(*[one.agent.close for one in (*others, again, far)])
    assert started[0] < SETTINGS.answer_seconds
    assert any(one.outcome != "alone" for one in again.met), again.met


def test_islands_that_lost_their_first_checkpoint_begin_anew_without_an_absent_peer():
    roster = on_loopback(*FOUR)
    settings = Settings(patience=6, lost_seconds=1.5)
    sites = [Site(name, roster, settings=settings, began_before=True) for name in FOUR[:3]]
    side_by_side(*[site.open for site in sites])
    side_by_side(*[lambda site=site: site.train(4, SECONDS) for site in sites])
    side_by_side(*[site.agent.close for site in sites])
    for site in sites:
        assert site.share(without="rome") > 0.5, site.met  # all but the last round, which the end of training cuts off
        assert any("rome did not answer" in line for line in site.lines)


def test_an_island_whose_workdir_and_clock_were_lost_is_not_locked_out():
    roster = on_loopback("berlin", "paris")
    paris, berlin = Site("paris", roster, settings=SETTINGS), Site("berlin", roster, settings=SETTINGS, incarnation=99)
    side_by_side(paris.open, berlin.open)
    side_by_side(*[lambda site=site: site.train(3, 0.4) for site in (paris, berlin)])
    berlin.agent.close()
    again = Site("berlin", roster, settings=SETTINGS, incarnation=5)

    def rejoin() -> None:
        again.open()
        while not again.heals:  # it takes paris's state
            again.look()
        again.train(8, 0.4)

    side_by_side(lambda: paris.train(12, 0.4), rejoin)
    side_by_side(paris.agent.close, again.agent.close)
    assert again.agent.incarnation > 99
    assert [one.reason for one in again.met if "past" in one.reason] == []
    assert again.share() > 0.5, again.met
