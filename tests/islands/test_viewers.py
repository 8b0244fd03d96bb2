"""Viewer keys: they open the status and recent events of islands and nothing else."""

import dataclasses
import stat
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from noloco_jax.errors import UserError
from noloco_jax.island.command import main as island
from noloco_jax.islands.certificates import names_of, owner_and_issue
from noloco_jax.islands.client import Client
from noloco_jax.islands.frames import ArraySpec
from noloco_jax.islands.keys import load_keys, make_keys
from noloco_jax.islands.peer_errors import PeerError, RefusedError
from noloco_jax.islands.protocol.members import Entry, News
from noloco_jax.islands.protocol.messages import (
    Caller,
    ExchangeId,
    Hello,
    Leave,
    StateRequest,
    Status,
    StatusRequest,
    from_json,
    to_json,
)
from noloco_jax.islands.recent import WATCH
from noloco_jax.islands.roster import Roster
from noloco_jax.islands.snapshots import ABOUT
from support.island_nodes import IDENTITY
from support.islands import nothing
from support.rosters import on_loopback, written
from support.sites import Site, side_by_side

NAMES = ("paris", "berlin")
VIEWER = "viewer_ann"
ONLY_LOOK = "viewer_ann may only look"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def roster(folder) -> Roster:
    roster = on_loopback(*NAMES)
    written(roster, folder / "roster.toml")
    make_keys(roster, folder / "keys", 30, viewers=[VIEWER])
    return roster


@pytest.fixture(scope="module")
def sites(roster, folder):
    """Two islands that train with each other for three rounds."""
    sites = [Site(name, roster, credentials=load_keys(folder / "keys" / name, name)) for name in NAMES]
    try:
        side_by_side(*(site.open for site in sites))
        side_by_side(*(lambda site=site: site.train(3, 0.3) for site in sites))
        yield sites
    finally:
        side_by_side(*(site.close for site in sites))


@pytest.fixture
def viewer(roster, folder, sites) -> Client:
    return Client(roster, VIEWER, load_keys(folder / "keys" / VIEWER, VIEWER), "paris")


def ask(client: Client, header) -> Status:
    with client.exchange(to_json(header), nothing, 10.0) as channel:
        answer = from_json(channel.receive().header)
    assert isinstance(answer, Status)
    return answer


def test_a_viewer_sees_the_status_and_the_recent_events(viewer):
    assert ask(viewer, StatusRequest()).round == 2
    shown = viewer.action(WATCH, {"after": 0}, 10.0)
    assert (shown["name"], shown["run"], shown["round"], shown["training"]) == ("paris", "test", 2, True)
    assert [(peer["name"], peer["refuses"], peer["quarantined_until"]) for peer in shown["peers"]] == [
        ("berlin", "", 0)
    ]


CALLER = Caller(IDENTITY, VIEWER, "paris", 10**9, 99)
XID = ExchangeId(2, VIEWER, 1, 0)
ENTRY = Entry(-1, "paris", "127.0.0.1:1", 0, 1, 0, 10**15)


@pytest.mark.parametrize(
    "header",
    [
        Hello(CALLER, XID, 1),
        Leave(CALLER, finished=True),
        StateRequest(CALLER, lineage=False),
        StatusRequest(identity=IDENTITY),
        StatusRequest(xid=XID),
        StatusRequest(news=News((ENTRY,))),
        StatusRequest(until_ready=True),
    ],
    ids=lambda header: type(header).__name__,
)
def test_every_other_call_of_the_protocol_is_refused(viewer, sites, header):
    with pytest.raises(RefusedError, match=ONLY_LOOK), viewer.exchange(to_json(header), nothing, 10.0) as channel:
        channel.receive()
    assert ask(viewer, StatusRequest()).members == 2


def test_weights_and_other_actions_are_refused(viewer):
    with pytest.raises(RefusedError, match=ONLY_LOOK):
        dict(viewer.state({}, {"progress": ArraySpec((2,), np.dtype(np.int64))}, 10.0))
    with pytest.raises(RefusedError, match=ONLY_LOOK):
        viewer.action(ABOUT, {}, 10.0)


def test_messages_after_a_viewers_request_are_ignored(viewer, sites):
    before = {name: (peer.away, peer.finished, peer.round) for name, peer in sites[0].agent._protocol.peers.items()}
    leave = Leave(dataclasses.replace(CALLER, sender="berlin"), finished=True)
    for header in (leave, StateRequest(CALLER, lineage=False), Hello(CALLER, XID, 1)):
        with viewer.exchange(to_json(StatusRequest()), nothing, 10.0) as channel:
            channel.send(to_json(header), None)
            try:
                while True:
                    assert isinstance(from_json(channel.receive().header), Status)
            except PeerError:
                pass  # the island ends the call
    after = {name: (peer.away, peer.finished, peer.round) for name, peer in sites[0].agent._protocol.peers.items()}
    assert after == before and not sites[0].agent.wants_state


def test_a_viewers_certificate_is_valid_for_no_island_and_no_server(folder, roster):
    certificate = x509.load_pem_x509_certificate((folder / "keys" / VIEWER / "cert.pem").read_bytes())
    assert {owner_and_issue(name)[0] for name in names_of(certificate)} == {VIEWER}
    purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(purposes) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    with pytest.raises(UserError, match="made out to viewer_ann, not to paris"):
        load_keys(folder / "keys" / VIEWER, "paris")


def test_a_viewer_that_says_it_is_an_island_is_refused(roster, folder, sites):
    client = Client(roster, "berlin", load_keys(folder / "keys" / VIEWER, VIEWER), "paris")
    with pytest.raises(RefusedError, match="says it is 'berlin', and its certificate is made out to 'viewer_ann'"):
        client.action(WATCH, {}, 10.0)


def test_the_command_makes_a_viewers_keys_and_status_takes_them(roster, folder, sites, capsys):
    flags = [f"--roster={folder / 'roster.toml'}", f"--out={folder / 'keys'}"]
    assert island(["keys", *flags, "--viewer=bob"]) == 0
    said = capsys.readouterr().out.splitlines()
    keys = folder / "keys" / "viewer_bob"
    assert said[1] == f"made: {keys}, valid for 90 days: it opens the status of islands and nothing else"
    assert stat.S_IMODE((keys / "key.pem").stat().st_mode) == 0o600
    first = (keys / "cert.pem").read_bytes()
    assert island(["keys", *flags, "--replace=viewer_bob"]) == 0
    assert (keys / "cert.pem").read_bytes() != first
    capsys.readouterr()
    assert island(["status", f"--roster={folder / 'roster.toml'}", f"--keys={keys}"]) == 0
    assert capsys.readouterr().out.count("training") == 2
    with pytest.raises(UserError, match="give a DNS label"):
        island(["keys", *flags, "--viewer=../bob"])


def test_a_viewers_keys_that_are_kept_are_named(roster, folder, capsys):
    flags = [f"--roster={folder / 'roster.toml'}", f"--out={folder / 'keys'}", "--viewer=ann"]
    assert island(["keys", *flags]) == 0
    assert "kept as they are: paris, berlin, viewer_ann" in capsys.readouterr().out.splitlines()
