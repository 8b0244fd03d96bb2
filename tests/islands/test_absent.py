"""Islands that a network swallows: the others meet as if nothing were, and it meets them again when it is back."""

from typing import get_args

import pytest

from noloco_jax.islands.protocol.settings import Settings
from support.fault_proxy import Direction
from support.sites import Site, rosters, side_by_side

FOUR = ("berlin", "oslo", "paris", "rome")
SECONDS = 0.7  # of a round
AWAY = range(3, 10)  # rounds
SETTINGS = Settings(patience=4)  # seconds, on a busy machine


@pytest.mark.parametrize("silent", [set(get_args(Direction)), {"up"}, {"down"}], ids=["all", "there", "back"])
def test_who_is_behind_a_black_hole_or_half_a_connection_costs_the_others_nothing(silent):
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
        # All rounds together took less than the answer to one call may: no round waited for one.
        assert sum(site.seconds[round] for round in AWAY) < SETTINGS.answer_seconds
    assert far.round == AWAY.stop + 9 - 1 and not far.heals  # it trained on
    assert any(one.outcome == "alone" for one in far.met)
    assert far.share(AWAY.stop + 3) > 0.5, far.met
    for site in others:
        logged = {one.round for one in (*site.met, *far.met) if one.one_sided}
        together = {one.round for one in far.met if one.partner == site.name}
        halves = {round for round in together if (round in site.corrections) != (round in far.corrections)}
        assert halves <= logged  # whose last word the network swallowed
