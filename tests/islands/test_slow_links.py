"""Islands behind a slow link: many of their exchanges complete, and the other islands do not wait for them."""

import statistics
import time

import numpy as np
import trustme

from noloco_jax.islands import state_shares
from noloco_jax.islands.payload import norm_of
from noloco_jax.islands.protocol.context import Settings
from support.fault_proxy import Link
from support.islands import keys_of
from support.sites import Site, narrow, rosters, side_by_side

BOTH = ("berlin", "paris")
FOUR = ("berlin", "oslo", "paris", "rome")


def train_all(sites: list[Site], rounds: int, seconds: float) -> None:
    side_by_side(*[site.open for site in sites])
    side_by_side(*[lambda site=site: site.train(rounds, seconds) for site in sites])
    side_by_side(*[site.close for site in sites])


def check_corrections_cancel(one: Site, other: Site) -> None:
    """Assert that the corrections of both islands of a round cancel out."""
    together = {met.round for met in one.met if met.partner == other.name}
    for round in together & one.corrections.keys() & other.corrections.keys():
        np.testing.assert_array_equal(one.corrections[round], -other.corrections[round])


def test_an_exchange_counts_the_steps_that_its_island_began_meanwhile():
    with rosters(BOTH, far="paris") as (seen, _):
        sites = [Site(name, seen[name], settings=Settings(patience=6)) for name in BOTH]
        side_by_side(*[site.open for site in sites])
        for site, steps in zip(sites, (3, 0), strict=True):
            for _ in range(10):
                site.agent.stride(1)
            site.round, message = 0, site.message(0)
            site.agent.end_round(0, 1, [message], norm_of([message]))
            for _ in range(steps):
                site.agent.stride(1)
        side_by_side(*[site.close for site in sites])
    assert [[(met.outcome, met.steps_late) for met in site.met] for site in sites] == [[("met", 3)], [("met", 0)]]


def test_a_link_with_half_the_needed_rate_completes_30_percent_of_the_exchanges():
    """Fragments are exchanged one by one: parallel transfers of several rounds would all miss their deadline."""
    fragments, seconds, size = 4, 0.4, 100_000
    with rosters(BOTH, far="paris") as (seen, proxies):
        narrow(proxies, rate=0.5 * 4 * size / seconds, latency=0.0)
        settings = Settings(patience=2 * fragments)
        sites = [Site(name, seen[name], size=size, settings=settings) for name in BOTH]
        train_all(sites, 50, seconds)
    check_corrections_cancel(*sites)
    late = [one for one in sites[0].met if one.round >= 10]
    assert sites[0].share(10) > 0.3, late
    assert {round % fragments for round in sites[0].corrections if round >= 10} == set(range(fragments))


def test_one_island_on_a_slow_distant_link_never_delays_the_others():
    """The link has 1 Mbit/s and a latency of 100 ms."""
    with rosters(FOUR, far="rome") as (seen, proxies):
        narrow(proxies, rate=125e3, latency=0.1)
        settings = Settings(patience=6)  # no island waits that long; a busy machine may need it
        sites = [Site(name, seen[name], size=20_000, settings=settings) for name in FOUR]
        train_all(sites, 13, 1.5)
    *others, far = sites
    for site in others:
        check_corrections_cancel(site, far)
        assert site.share(without="rome") == 1, site.met
        with_far = [one.round for one in site.met if one.partner == "rome"]
        waits = [sum(site.seconds[round : round + 2]) for round in with_far]
        assert statistics.median(waits) < 0.3  # below the 0.64 s of a transfer: none was waited for
    assert far.share() > 0.5, far.met


def test_catching_up_over_a_slow_link_survives_a_silent_donor(monkeypatch):
    """Catch up on 1.2 MB of weights, quantized to a quarter, at 200 kB/s, and join the others' current round."""
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

        def rejoin() -> None:
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
        side_by_side(rejoin, *[lambda one=one: one.train(24, 0.5) for one in donors])
        side_by_side(*[one.agent.close for one in (*donors, back)])
    assert seconds[0] < 15 and abs(rounds[0]) <= 1
    assert any(one.outcome != "alone" for one in back.met), back.met
