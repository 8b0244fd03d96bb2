"""Islands behind NAT: a forwarded port, and islands that can only dial out."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from typing import Any, cast

import pytest
import trustme

from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.islands import network, relay
from noloco_jax.islands.client import Client
from noloco_jax.islands.entries import dials_of
from noloco_jax.islands.keys import load_keys, make_keys
from noloco_jax.islands.network import Network
from noloco_jax.islands.peer_errors import BusyError, PeerError, RefusedError
from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.protocol.events import Arrived, Broken, Open, Opened, RoundEnded, Tick
from noloco_jax.islands.protocol.island import Island as Protocol
from noloco_jax.islands.protocol.members import Members
from noloco_jax.islands.protocol.messages import AtRound, Caller, Hello, Leave, StatusRequest
from noloco_jax.islands.query import clients_of
from noloco_jax.islands.recent import WATCH
from noloco_jax.islands.roster import Address, Island, Roster, parse_dialled, read_roster
from noloco_jax.islands.server import Handlers, Server
from noloco_jax.islands.snapshots import ABOUT
from support import namespaces, processes, warm
from support.fault_proxy import FaultProxy
from support.island_nodes import IDENTITY
from support.islands import keys_of
from support.paths import ROOT
from support.ports import free_ports
from support.rosters import written
from support.sites import Site, side_by_side

FOUR = ("berlin", "oslo", "paris", "rome")
NOWHERE = parse_dialled("none")
SETTINGS = Settings(patience=40, retry_seconds=0.2)  # for short rounds, which do not get longer on a busy machine


def roster_of(**addresses: Address) -> Roster:
    return Roster("test", tuple(Island(name, addresses[name]) for name in sorted(addresses)))


def test_a_roster_may_have_several_islands_that_only_dial_out(tmp_path):
    path = written(roster_of(oslo=NOWHERE, paris=Address("paris", 7070), rome=NOWHERE), tmp_path / "roster.toml")
    assert 'address = "none"' in path.read_text()
    roster = read_roster(path)
    assert [address.can_be_dialled for _, address in roster.islands] == [False, True, False]
    assert str(roster.address("oslo")) == "none" and island(["keys", f"--roster={path}", f"--out={tmp_path}/keys"]) == 0


@pytest.mark.parametrize(
    ("own", "peer", "calls"), [("none", "x:1", True), ("x:1", "none", False), ("x:1", "y:1", True)]
)
def test_an_island_that_only_dials_out_dials_in_every_pair(own, peer, calls):
    roster = roster_of(a=parse_dialled(own), b=parse_dialled(peer))
    rules = Settings(), None, False, None, dials_of(roster, Members(roster.names))
    machine = Protocol("a", ["b"], IDENTITY, lambda round: "b", 7, *rules)
    machine._catch_up.training = True
    actions = machine.handle(RoundEnded(0, 1, 1.0), 1.0)
    assert any(isinstance(action, Open) for action in actions) is calls


@pytest.mark.parametrize(("own", "calls"), [("none", 1), ("x:1", 0)])
def test_an_island_that_nobody_dials_tries_a_peer_that_has_left_once_a_round(own, calls):
    """Guard a regression: a peer that had restarted was never met again, as only this island could have called."""
    roster = roster_of(a=parse_dialled(own), b=parse_dialled("y:1"))
    rules = Settings(), None, False, None, dials_of(roster, Members(roster.names))
    machine = Protocol("a", ["b"], IDENTITY, lambda round: "b", 7, *rules)
    machine._catch_up.training = True
    machine.handle(Opened(("in", 0), "b", Leave(Caller(IDENTITY, "b", "a", 1, 0))), 0.0)
    for round in range(3):
        now = 100.0 * round
        dialled = opened(machine.handle(RoundEnded(round, 1, 1.0), now))
        assert len(dialled) == calls
        for channel in dialled:
            machine.handle(Broken(channel), now + 1.0)
        assert not [channel for wait in range(90) for channel in opened(machine.handle(Tick(), now + 2.0 + wait))]


def test_an_island_that_nobody_dials_retries_a_peer_that_answers_after_its_goodbye():
    roster = roster_of(a=NOWHERE, b=parse_dialled("y:1"))
    rules = Settings(), None, False, None, dials_of(roster, Members(roster.names))
    machine = Protocol("a", ["b"], IDENTITY, lambda round: "b", 7, *rules)
    machine._catch_up.training = True
    machine.handle(Opened(("in", 0), "b", Leave(Caller(IDENTITY, "b", "a", 1, 0))), 0.0)
    [channel] = opened(machine.handle(RoundEnded(0, 1, 1.0), 1.0))
    machine.handle(Arrived(channel, AtRound(-1, None)), 2.0)  # it is back, and a little later
    assert [channel for wait in range(90) for channel in opened(machine.handle(Tick(), 3.0 + wait))]


def test_a_question_of_a_peer_that_has_left_says_that_it_is_back():
    machine = Protocol("a", ["b"], IDENTITY, lambda round: "b", 7)
    machine._catch_up.training = True
    machine.handle(Opened(("in", 0), "b", Leave(Caller(IDENTITY, "b", "a", 1, 0))), 0.0)
    assert not opened(machine.handle(RoundEnded(0, 1, 1.0), 1.0))
    machine.handle(Opened(("in", 1), "b", StatusRequest(IDENTITY)), 2.0)
    assert opened(machine.handle(RoundEnded(1, 1, 1.0), 3.0))


def opened(actions: list) -> list:
    """Return the channels of calls for an exchange."""
    return [action.channel for action in actions if isinstance(action, Open) and isinstance(action.header, Hello)]


def test_islands_that_only_dial_out_exchange_with_every_peer_through_a_relay(monkeypatch):
    """TLS is end to end: the relay sees no plaintext of a message."""
    relayed: list[bytes] = []
    read = relay.CallPipe.read

    def recorded(pipe: relay.CallPipe) -> bytes:
        piece = read(pipe)
        if len(piece) > 100:  # no control message of the relay
            relayed.append(piece)
        return piece

    monkeypatch.setattr(relay.CallPipe, "read", recorded)
    ca, ports = trustme.CA(), free_ports(2)
    addresses = {"berlin": Address("127.0.0.1", ports[0]), "oslo": NOWHERE, "rome": NOWHERE}
    roster = roster_of(paris=Address("127.0.0.1", ports[1]), **addresses)
    sites = [Site(name, roster, settings=SETTINGS, credentials=keys_of(ca, name)) for name in FOUR]
    side_by_side(*[site.open for site in sites])
    side_by_side(*[lambda site=site: site.train(12, 0.5) for site in sites])
    side_by_side(*[site.close for site in sites])
    assert relayed[0][:2] == b"\x16\x03"  # a TLS handshake
    content = [site.message(round).tobytes()[:64] for site in sites for round in range(12)]
    assert not any(one in piece for one in content for piece in relayed)
    assert sum(map(len, relayed)) > 4 * 1000 * 4  # bytes: at least two exchanges
    for site in sites:
        met = {one.partner for one in site.met if one.outcome != "alone"}
        assert met == {*FOUR} - {site.name}, site.met
        assert site.share(2) > 0.6, site.met


def test_commands_reach_islands_that_only_dial_out_through_a_relay(tmp_path, capsys):
    """A viewer's keys stay read-only through a relay."""
    ports = free_ports(2)
    dialled = {"berlin": Address("127.0.0.1", ports[0]), "paris": Address("127.0.0.1", ports[1])}
    roster = roster_of(oslo=NOWHERE, rome=NOWHERE, **dialled)
    make_keys(roster, tmp_path / "keys", 30, viewers=["viewer_ann"])
    written(roster, tmp_path / "roster.toml")
    keys = {name: load_keys(tmp_path / "keys" / name, name) for name in FOUR}
    sites = [Site(name, roster, settings=SETTINGS, credentials=keys[name]) for name in FOUR]
    try:
        side_by_side(*[site.open for site in sites])
        side_by_side(*[lambda site=site: site.train(3, 0.5) for site in sites])
        for folder in ("keys", "keys/paris", "keys/viewer_ann"):
            clients = clients_of(roster, tmp_path / folder)
            for name in ("oslo", "rome"):
                client = clients[name]
                assert isinstance(client, Client) and client.action(WATCH, {"after": 0}, 20.0)["name"] == name
        assert island(["status", f"--roster={tmp_path / 'roster.toml'}", f"--keys={tmp_path / 'keys'}"]) == 0
        assert re.findall(r"(\w+) +│ 3 +│ training", capsys.readouterr().out) == [*FOUR]
        viewer = clients_of(roster, tmp_path / "keys/viewer_ann")["oslo"]
        assert isinstance(viewer, Client)
        with pytest.raises(RefusedError, match="may only look"):
            viewer.action(ABOUT, {}, 20.0)
    finally:
        side_by_side(*[site.close for site in sites])
    gone = clients_of(roster, tmp_path / "keys")["oslo"]
    assert isinstance(gone, Client)
    with pytest.raises(PeerError, match="oslo only dials out, and no relay that answers reaches it"):
        gone.action(WATCH, {"after": 0}, 20.0)


def test_the_listen_address_may_differ_from_the_rosters_address(tmp_path):
    """A proxy plays the router that forwards a port."""
    ca, ports = trustme.CA(), free_ports(2)
    with FaultProxy(ports[0]) as router:
        addresses = Address("127.0.0.1", router.port), Address("127.0.0.1", ports[1])
        roster = Roster("test", tuple(map(Island, ("berlin", "paris"), addresses)))
        inside = Address("127.0.0.1", ports[0])
        sites = [
            Site(name, roster, settings=SETTINGS, credentials=keys_of(ca, name), listen=listen)
            for name, listen in (("berlin", inside), ("paris", None))
        ]
        side_by_side(*[site.open for site in sites])
        side_by_side(*[lambda site=site: site.train(6, 0.4) for site in sites])
        side_by_side(*[site.close for site in sites])
        assert router.accepted and sites[1].share(1) > 0.7, sites[1].met


def test_an_island_without_keys_listens_on_loopback_only():
    roster = Roster("test", tuple(map(Island, ("a", "b"), (Address("127.0.0.1", 1), Address("127.0.0.1", 2)))))
    handlers = Handlers(lambda *_: None, lambda *_: (), {}, print)
    with pytest.raises(UserError, match="without keys"):
        Server(roster, "a", None, handlers, listen=Address("0.0.0.0", 0))


class End:
    """Fake tunnel end: yields the given pieces when read, and records those written."""

    def __init__(self, *pieces: bytes):
        self.pieces, self.written = [*pieces, b""], []
        self.is_closed = threading.Event()

    def read(self) -> bytes:
        if len(self.pieces) == 1:
            self.is_closed.wait(10)
        return self.pieces.pop(0)

    def write(self, piece: bytes) -> None:
        self.written.append(piece)

    def close(self) -> None:
        self.is_closed.set()


def register(relay_: relay.Relay, name: str) -> End:
    """Register an island at a relay; return the tunnel end on which the relay announces callers."""
    end: Any = End()
    threading.Thread(target=relay_.call, args=(relay.AWAIT, name, {}, end), daemon=True).start()
    while not end.written:
        time.sleep(0.01)
    return end


def token_of(end: End, number: int = 1) -> str:
    while len(end.written) <= number:
        time.sleep(0.01)
    return json.loads(end.written[number])["token"]


def test_a_relay_forwards_bytes_both_ways_to_the_intended_island_only():
    one, caller, called = relay.Relay(), End(b"to oslo"), End(b"to rome")
    announcements = register(one, "oslo")
    thread = threading.Thread(target=one.call, args=(relay.RELAY, "rome", {"to": "oslo"}, caller))
    thread.start()
    token = token_of(announcements)
    with pytest.raises(RefusedError, match="any more"):
        one.call(relay.ACCEPT, "paris", {"token": token}, cast(Any, End()))
    accepts = threading.Thread(target=one.call, args=(relay.ACCEPT, "oslo", {"token": token}, called))
    accepts.start()
    while not (b"to oslo" in called.written and b"to rome" in caller.written):
        time.sleep(0.01)
    with pytest.raises(RefusedError, match="any more"):  # a token is valid once
        one.call(relay.ACCEPT, "oslo", {"token": token}, cast(Any, End()))
    called.close()
    thread.join(10)
    accepts.join(10)
    assert not thread.is_alive() and not accepts.is_alive() and caller.is_closed.is_set()


def test_one_relay_serves_twenty_islands_that_only_dial_out():
    """Regression test: all but 16 waited for callers nowhere, and their rounds were alone without a line."""
    one, refused = relay.Relay(), []

    def wait(name: str) -> None:
        try:
            one.call(relay.AWAIT, name, {}, cast(Any, End()))
        except BusyError:
            refused.append(name)

    for number in range(20):
        threading.Thread(target=wait, args=(f"island{number}",), daemon=True).start()
    while len(one._awaiting) + len(refused) < 20:
        time.sleep(0.01)
    assert not refused
    one.close()


def test_a_relay_has_limits(monkeypatch):
    monkeypatch.setattr(relay, "_ANSWER_SECONDS", 0.3)
    one = relay.Relay()
    with pytest.raises(BusyError, match="does not wait"), one.tunnel("rome", "oslo", End()):
        pass
    register(one, "oslo")
    with pytest.raises(BusyError, match="does not answer"), one.tunnel("rome", "oslo", End()):
        pass
    monkeypatch.setattr(relay, "_ANSWER_SECONDS", 60.0)  # in which a busy machine starts all of the threads

    def ask() -> None:
        with contextlib.suppress(BusyError):
            one.call(relay.RELAY, "rome", {"to": "oslo"}, cast(Any, End()))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(relay.MOST_OF_A_MEMBER)]
    for thread in threads:
        thread.start()
    while one._open < relay.MOST_OF_A_MEMBER:
        time.sleep(0.01)
    with pytest.raises(BusyError, match="relayed here already"), one.tunnel("paris", "oslo", End()):
        pass
    monkeypatch.setattr(relay, "MOST_AWAITING", 1)
    with pytest.raises(BusyError, match="wait for callers here already"):
        one.call(relay.AWAIT, "berlin", {}, cast(Any, End()))
    monkeypatch.setattr(relay, "MOST_BYTES", 10)
    source, sink = End(b"123456", b"123456", b"not passed on"), End()
    relay.pump(source, sink)
    assert sink.written == [b"123456", b"123456"] and source.is_closed.is_set()


def test_the_next_relay_takes_over_when_the_first_is_down():
    """oslo registers at two relays, in an order that its callers know."""
    ca, ports = trustme.CA(), free_ports(3)
    dialled = {name: Address("127.0.0.1", port) for name, port in zip(("berlin", "paris", "rome"), ports, strict=True)}
    roster = roster_of(oslo=NOWHERE, turin=NOWHERE, **dialled)
    first, *others = relay.relays_of("oslo", dialled)
    names = ("oslo", "turin", *others)
    sites = {
        name: Site(name, roster, settings=SETTINGS, credentials=keys_of(ca, name), members=Members(roster.names))
        for name in names
    }
    assert first not in sites
    try:
        side_by_side(*[site.agent.open for site in sites.values()])
        answer: dict[str, Any] = {}
        deadline = time.monotonic() + 30
        while not answer and time.monotonic() < deadline:
            with contextlib.suppress(PeerError):
                answer = sites["turin"].agent.network.clients["oslo"].action("about", {}, 5.0)
        assert answer["round"] == -1
    finally:
        side_by_side(*[site.agent.close for site in sites.values()])


@pytest.mark.skipif(not namespaces.are_permitted(), reason="needs root, and network namespaces")
def test_processes_without_a_route_to_each_other_exchange_and_merge_through_a_relay(tmp_path):
    """Each of the two that only dial out is in a network of its own, which reaches only the third."""
    names = ("paris", "oslo", "rome")
    roster = roster_of(paris=Address(namespaces.HUB, 7070), oslo=NOWHERE, rome=NOWHERE)
    written(roster, tmp_path / "roster.toml")
    assert island(["keys", f"--roster={tmp_path}/roster.toml", f"--out={tmp_path}/keys"]) == 0
    environment = processes.environment(tmp_path / "config.py")

    def command(place: int, name: str) -> list[str]:
        flags = (f"--roster={tmp_path}/roster.toml", f"--keys={tmp_path}/keys/{name}", f"--workdir={tmp_path / name}")
        module = ("support.namespaces", str(place), "noloco_jax.examples.island_numpy")
        return [sys.executable, "-m", *module, *flags, f"--name={name}", "--steps=300"]

    with namespaces.hub_and_spokes(2) as places:
        for place, refusal in ((places[0], True), (places[1], False)):  # a route but no listener; no route
            enter = ("nsenter", f"--target={place}", "--net")
            reach = "import socket; socket.create_connection(('10.77.2.2', 9), 1)"
            tried = subprocess.run([*enter, sys.executable, "-c", reach], capture_output=True, text=True, check=False)
            assert ("refused" in tried.stderr) is refusal
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started = [
            warm.Popen(command(place, name), env=environment, cwd=ROOT, **pipes)
            for place, name in zip(places, names, strict=True)
        ]
        results = processes.finish(started, 250)
    assert [status for status, _ in results] == [0, 0, 0], processes.report(results)
    outputs = {name: output for name, (_, output) in zip(names, results, strict=True)}
    for name, output in outputs.items():
        assert all(f" met {other}" in output for other in names if other != name), outputs
        assert "the mean of 3 of 3 islands" in output, outputs


def test_an_island_registers_again_only_at_the_relays_that_callers_try(monkeypatch):
    """Guard a regression: after each ten-minute call the island moved on to the next relay, past those callers try."""
    visited: list[str] = []
    done = threading.Event()

    def wait_at(self, relay: str) -> bool:
        visited.append(relay)
        if len(visited) >= 40:
            done.set()
        return True

    monkeypatch.setattr(relay, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(relay.RelayedServer, "_wait_at", wait_at)
    members = [f"island{number}" for number in range(12)]
    server = relay.RelayedServer("oslo", {}, lambda: members, Address("127.0.0.1", 1))
    assert done.wait(30)
    server.close()
    assert set(visited) <= set(relay.relays_of("oslo", members)[: relay.RELAYS])


def test_an_island_that_never_opened_leaves_no_port_when_it_is_closed():
    """As one does whose own port is in use."""
    ca, (port,) = trustme.CA(), free_ports(1)
    roster = roster_of(oslo=NOWHERE, paris=Address("127.0.0.1", port))
    site = Site("paris", roster, settings=SETTINGS, credentials=keys_of(ca, "paris"))
    towards_oslo = site.agent.network._ports["oslo"]
    site.agent.close()
    assert towards_oslo._listener.fileno() == -1


def test_a_connection_accepted_while_a_relayed_port_closes_is_closed(monkeypatch):
    """Guard a regression: it was left to the garbage collector, which warned of an unclosed socket."""
    port = relay.RelayedPort("rome", "oslo", {}, lambda: [], relay.Relay())
    start, accepted = port._tunnels.start, []

    def start_late(act: Any, connection: socket.socket) -> bool:
        accepted.append(connection)
        port._tunnels.closing.set()
        return start(act, connection)

    monkeypatch.setattr(port._tunnels, "start", start_late)
    with socket.create_connection((port.address.host, port.address.port), timeout=60) as caller:
        assert caller.recv(1) == b""
    port.close()
    assert [connection.fileno() for connection in accepted] == [-1]


def test_a_new_member_is_taken_for_a_relay_only_once_it_can_be_called(monkeypatch):
    """The threads that wait for callers call the roster's members, and one without a client would end them."""
    relays: list[list[str]] = []

    def made(roster: Roster, name: str, credentials: None, peer: str, *rest: Any) -> Client:
        relays.append(own._relays())
        return Client(roster, name, credentials, peer, *rest)

    monkeypatch.setattr(network, "Client", made)
    paris, rome = Address("127.0.0.1", 1), Address("127.0.0.1", 2)
    own = Network(roster_of(oslo=NOWHERE), "oslo", None, print)
    own.follow(roster_of(oslo=NOWHERE, paris=paris), {})
    own.follow(roster_of(oslo=NOWHERE, paris=paris, rome=rome), {})
    assert relays == [[], ["paris"]] and own._relays() == ["paris", "rome"]
