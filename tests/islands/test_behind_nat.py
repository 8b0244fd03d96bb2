"""Islands behind a router: a port that is forwarded, and islands that can only dial out."""

import pytest
import trustme

from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.islands.entries import dials_of
from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.events import Open, RoundEnded
from noloco_jax.islands.protocol.island import Island as Protocol
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.roster import Address, Island, Roster, parse_dialled, read_roster
from noloco_jax.islands.server import Handlers, Server
from support.fault_proxy import FaultProxy
from support.island_nodes import IDENTITY
from support.islands import keys_of
from support.ports import free_ports
from support.sites import Site, side_by_side

FOUR = ("berlin", "oslo", "paris", "rome")
NOWHERE = parse_dialled("none")
SETTINGS = Settings(patience=4, retry_seconds=0.2)  # of short rounds


def roster_of(**addresses: Address) -> Roster:
    return Roster("test", tuple(Island(name, addresses[name]) for name in sorted(addresses)))


def test_a_roster_may_have_several_islands_that_only_dial_out(tmp_path):
    path = tmp_path / "roster.toml"
    entries = [f'[[island]]\nname = "{name}"\naddress = "none"\n' for name in ("oslo", "rome")]
    path.write_text('run = "test"\n[[island]]\nname = "paris"\naddress = "paris:7070"\n' + "".join(entries))
    roster = read_roster(path)
    assert [address.can_be_dialled for _, address in roster.islands] == [True, False, False]
    assert str(roster.address("oslo")) == "none" and island(["keys", f"--roster={path}", f"--out={tmp_path}/keys"]) == 0


@pytest.mark.parametrize(
    ("own", "peer", "calls"), [("none", "x:1", True), ("x:1", "none", False), ("x:1", "y:1", True)]
)
def test_who_only_dials_out_is_the_dialler_of_every_pair(own, peer, calls):
    roster = roster_of(a=parse_dialled(own), b=parse_dialled(peer))
    rules = Settings(), None, False, None, dials_of(roster, Members(roster.names), "a")
    machine = Protocol("a", ["b"], IDENTITY, lambda round: "b", 7, *rules)
    machine._catch_up.training = True
    actions = machine.handle(RoundEnded(0, 1, 1.0), 1.0)
    assert any(isinstance(action, Open) for action in actions) is calls


def test_islands_that_only_dial_out_meet_all_that_can_be_reached():
    """Over TLS; nobody ever connects to them."""
    ca, ports = trustme.CA(), free_ports(2)
    addresses = {"berlin": Address("127.0.0.1", ports[0]), "oslo": NOWHERE, "rome": NOWHERE}
    roster = roster_of(paris=Address("127.0.0.1", ports[1]), **addresses)
    sites = [Site(name, roster, settings=SETTINGS, credentials=keys_of(ca, name)) for name in FOUR]
    side_by_side(*[site.open for site in sites])
    side_by_side(*[lambda site=site: site.train(12, 0.5) for site in sites])
    side_by_side(*[site.close for site in sites])
    for site in sites:
        met = {one.partner for one in site.met if one.outcome != "alone"}
        assert met >= {"berlin", "paris"} - {site.name}, site.met
        hidden = "rome" if site.name == "oslo" else ""
        assert site.share(2, without=hidden) > 0.6, site.met


def test_an_island_listens_where_it_is_told_and_is_dialled_where_the_roster_says(tmp_path):
    """As behind a router that forwards a port, which is a proxy here."""
    ca, ports = trustme.CA(), free_ports(2)
    with FaultProxy(ports[0]) as router:
        addresses = Address("127.0.0.1", router.port), Address("127.0.0.1", ports[1])
        roster = Roster("test", tuple(map(Island, ("berlin", "paris"), addresses)))
        inside = Address("127.0.0.1", ports[0])
        sites = [
            Site(name, roster, credentials=keys_of(ca, name), listen=listen)
            for name, listen in (("berlin", inside), ("paris", None))
        ]
        side_by_side(*[site.open for site in sites])
        side_by_side(*[lambda site=site: site.train(6, 0.4) for site in sites])
        side_by_side(*[site.close for site in sites])
        assert router.accepted and sites[1].share(1) > 0.7, sites[1].met


def test_without_keys_an_island_listens_on_loopback_alone():
    roster = Roster("test", tuple(map(Island, ("a", "b"), (Address("127.0.0.1", 1), Address("127.0.0.1", 2)))))
    handlers = Handlers(lambda *_: None, lambda *_: (), {}, print)
    with pytest.raises(UserError, match="without keys"):
        Server(roster, "a", None, handlers, listen=Address("0.0.0.0", 0))
