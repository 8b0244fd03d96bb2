"""An island behind a narrow line: what of its messages comes through, and that the others do not wait for it."""

import statistics
import time

import numpy as np
import trustme

from noloco_jax.islands import state_shares
from noloco_jax.islands.protocol.context import Settings
from support.fault_proxy import Link
from support.islands import keys_of
from support.sites import Site, narrow, rosters, side_by_side

FOUR = ("berlin", "oslo", "paris", "rome")


def train_all(sites: list[Site], rounds: int, seconds: float) -> None:
    side_by_side(*[site.open for site in sites])
    side_by_side(*[lambda site=site: site.train(rounds, seconds) for site in sites])
    side_by_side(*[site.close for site in sites])


def check_halves(one: Site, other: Site) -> None:
    """Both islands' corrections of a round are two halves that cancel out."""
    together = {met.round for met in one.met if met.partner == other.name}
    for round in together & one.corrections.keys() & other.corrections.keys():
        np.testing.assert_array_equal(one.corrections[round], -other.corrections[round])


def test_a_line_for_half_of_all_messages_brings_nearly_half_of_them_together():
    """Fragments go one by one, or a line that is shared by all of the last rounds would end none of them in time."""
    fragments, seconds, size = 4, 0.4, 100_000
    with rosters(("berlin", "paris"), far="paris") as (seen, proxies):
        narrow(proxies, rate=0.5 * 4 * size / seconds, latency=0.0)
        settings = Settings(patience=2 * fragments)
        sites = [Site(name, seen[name], size=size, settings=settings) for name in ("berlin", "paris")]
        train_all(sites, 50, seconds)
    check_halves(*sites)
    late = [one for one in sites[0].met if one.round >= 10]
    assert sites[0].share(10) > 0.3, late
    assert {round % fragments for round in sites[0].corrections if round >= 10} == set(range(fragments))


def test_one_slow_and_distant_island_holds_the_others_up_in_nothing():
    """1 Mbit/s and 100 ms."""
    with rosters(FOUR, far="rome") as (seen, proxies):
        narrow(proxies, rate=125e3, latency=0.1)
        settings = Settings(patience=6)  # nobody waits for it, and a busy machine may need it
        sites = [Site(name, seen[name], size=20_000, settings=settings) for name in FOUR]
        train_all(sites, 13, 1.5)
    *others, far = sites
    for site in others:
        check_halves(site, far)
        assert site.share(without="rome") == 1, site.met
        with_far = [one.round for one in site.met if one.partner == "rome"]
        waits = [sum(site.seconds[round : round + 2]) for round in with_far]
        assert statistics.median(waits) < 0.3  # for no transfer, which takes 0.64 s
    assert far.share() > 0.5, far.met


def test_who_comes_back_over_a_slow_line_is_soon_back_though_a_donor_falls_silent_in_the_middle(monkeypatch):
    """200 kB/s for 1.2 MB of weights in a quarter of their bits, into the round in which the others are by then."""
    monkeypatch.setattr(state_shares, "SHARE_BYTES", 20_000)
    ca, settings = trustme.CA(), Settings(share_seconds=2.0)
    state = [np.random.default_rng(number).normal(0, 0.02, (1000, 300)).astype(np.float32) for number in range(5)]

    def site(name: str, incarnation: int = 1) -> Site:
        keys, options = keys_of(ca, name), {"settings": settings, "wire": "int8", "state": state}
        return Site(name, seen[name], size=100, credentials=keys, incarnation=incarnation, **options)

    with rosters(FOUR, far="rome") as (seen, proxies):
        *donors, gone = sites = [site(name) for name in FOUR]
        side_by_side(*[one.open for one in sites])
        side_by_side(*[lambda one=one: one.train(2, 0.3) for one in sites])
        gone.agent.close()
        out_of = proxies[1:]
        line = Link(200e3)
        for proxy in out_of:
            proxy.links = {"down": line}
        back, seconds = site("rome", incarnation=10), []

        def come_back() -> None:
            began = time.monotonic()
            back.agent.open()
            assert back.agent.admitted(60)
            back.agent.ready()
            while line.carried < 100e3:
                time.sleep(0.01)
            out_of[0].silent |= {"up", "down"}
            assert back.agent.decided(60)
            seconds.append(time.monotonic() - began)
            back.look()
            (healed,) = back.heals
            rounds.append(donors[-1].round - healed.round)
            assert np.abs(healed.leaves[0] - state[0]).max() <= np.abs(state[0]).max() / 254 * 1.02
            assert healed.leaves.keys() == {0}
            back.train(6, 0.5)

        rounds: list[int] = []
        side_by_side(come_back, *[lambda one=one: one.train(24, 0.5) for one in donors])
        side_by_side(*[one.agent.close for one in (*donors, back)])
    assert seconds[0] < 15 and abs(rounds[0]) <= 1
    assert any(one.outcome != "alone" for one in back.met), back.met
