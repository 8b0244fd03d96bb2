"""Connections between whole islands: kept from call to call, and replaced when lost or old."""

from typing import Any

import pytest
import trustme

from noloco_jax.islands import calls, connections
from noloco_jax.islands.connections import Connection, Connections
from noloco_jax.islands.protocol.context import Settings
from support.islands import keys_of
from support.sites import Site, rosters, side_by_side

NAMES = ("berlin", "paris")


def test_exchanges_reuse_connections_and_replace_only_lost_ones(monkeypatch):
    """The timeout of a finished call does not end the next call on its connection either."""
    monkeypatch.setattr(calls, "_LAST_WORDS_SECONDS", 0.3)
    ca = trustme.CA()
    with rosters(NAMES, far="paris") as (seen, proxies):
        settings = Settings(patience=40)  # short rounds, which do not get longer on a busy machine
        sites = [Site(n, seen[n], settings=settings, credentials=keys_of(ca, n)) for n in NAMES]

        def made_while_training(rounds: int) -> int:
            before = sum(proxy.accepted for proxy in proxies)
            side_by_side(*[lambda site=site: site.train(rounds, 0.25) for site in sites])
            return sum(proxy.accepted for proxy in proxies) - before

        side_by_side(*[site.open for site in sites])
        made_while_training(2)
        kept = made_while_training(8)
        for proxy in proxies:
            proxy.reset()
        after_reset = made_while_training(4)
        side_by_side(*[site.close for site in sites])
    assert kept <= 2  # crossing dials may need one more on each side
    assert 0 < after_reset <= 6
    assert all(site.share() == 1 for site in sites), [site.met for site in sites]


class FakeClient:
    """A Flight client that can only be closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("idle", "age", "kept"), [(0.0, 0.0, True), (46.0, 46.0, False), (0.0, 601.0, False), (44.0, 599.0, True)]
)
def test_a_connection_that_was_idle_too_long_or_is_too_old_is_closed(monkeypatch, idle, age, kept):
    now = [1000.0]
    monkeypatch.setattr(connections.time, "monotonic", lambda: now[0])
    pool, fake = Connections(), FakeClient()
    client: Any = fake
    pool.keep("paris", Connection(client, now[0] - age + idle))
    now[0] += idle
    assert (pool.take("paris") is not None) is kept and fake.closed is not kept
    assert pool.take("paris") is None  # one call at a time has a connection


def test_the_oldest_surplus_connections_are_closed_and_all_with_the_pool():
    pool, fakes = Connections(), [FakeClient() for _ in range(connections.MOST_KEPT + 3)]
    for number, fake in enumerate(fakes):
        client: Any = fake
        pool.keep(f"i{number}", Connection(client, connections.time.monotonic()))
    assert [fake.closed for fake in fakes] == [True] * 3 + [False] * connections.MOST_KEPT
    pool.close()
    assert all(fake.closed for fake in fakes)


def test_connections_made_before_keys_were_renewed_are_closed_also_after_their_running_calls():
    pool, fakes = Connections(), [FakeClient() for _ in range(3)]
    clients: list[Any] = list(fakes)
    idle, running = (Connection(client, connections.time.monotonic()) for client in clients[:2])
    pool.keep("paris", idle)
    pool.close_older()
    pool.keep("paris", running)
    assert [fake.closed for fake in fakes] == [True, True, False]
    later = Connection(clients[2], connections.time.monotonic() + 1e-6)
    pool.keep("paris", later)
    assert pool.take("paris") is later
