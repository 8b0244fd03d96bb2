"""Keys of a run: the command that makes them, how an island loads them, and how replaced ones are revoked."""

import contextlib
import datetime
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from cryptography import x509

from noloco_jax.errors import TransientError, UserError
from noloco_jax.island.command import main as island
from noloco_jax.islands import network
from noloco_jax.islands import server as server_module
from noloco_jax.islands.certificates import names_of, owner_and_issue
from noloco_jax.islands.client import Client
from noloco_jax.islands.keys import Credentials, Newest, credentials_for, expiry_warning, load_keys
from noloco_jax.islands.peer_errors import RefusedError, UnreachableError
from noloco_jax.islands.protocol.context import Settings
from noloco_jax.islands.roster import read_roster
from support.counted import in_time
from support.disks import small_disk
from support.islands import Recorder, calling, keys_of, roster_at, running
from support.rosters import on_loopback
from support.sites import Site, side_by_side

ROSTER = """
run = "test"
[[island]]
name = "paris"
address = "paris.example.org:7070"
[[island]]
name = "berlin"
address = "berlin.example.org:7070"
"""
ROME = """
[[island]]
name = "rome"
address = "rome.example.org:7070"
"""


@pytest.fixture
def roster(tmp_path) -> Path:
    path = tmp_path / "roster.toml"
    path.write_text(ROSTER)
    return path


def make(roster: Path, *more: str) -> Path:
    out = roster.parent / "keys"
    assert island(["keys", f"--roster={roster}", f"--out={out}", *more]) == 0
    return out


def openssl(*arguments: object) -> str:
    return subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def issue_of(keys: Credentials) -> int:
    return owner_and_issue(names_of(x509.load_pem_x509_certificate(keys.certificate))[0])[1]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*.pem")}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not installed")
def test_openssl_verifies_keys_for_server_and_client_under_the_islands_name_only(roster):
    keys = make(roster)
    for name in ("paris", "berlin"):
        folder = keys / name
        for purpose in ("sslserver", "sslclient"):
            said = openssl(
                *("verify", "-x509_strict", "-purpose", purpose, "-verify_hostname", name),
                *("-CAfile", folder / "ca.pem", folder / "cert.pem"),
            )
            assert said.endswith("OK\n")
        shown = openssl("x509", "-in", folder / "cert.pem", "-noout", "-ext", "subjectAltName")
        assert re.fullmatch(rf"    DNS:{name}\.[0-9]+, DNS:{name}", shown.splitlines()[1])
        public = openssl("pkey", "-in", folder / "key.pem", "-pubout")
        assert public == openssl("x509", "-in", folder / "cert.pem", "-noout", "-pubkey")


def test_only_the_owner_can_read_a_key(roster):
    keys = make(roster)
    for path in (keys / "ca-key.pem", keys / "paris/key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((keys / "paris").stat().st_mode) == 0o700
    assert {path.name for path in (keys / "paris").iterdir()} == {"ca.pem", "cert.pem", "key.pem"}


def test_the_keys_command_prints_what_to_do_with_each_key(roster, capsys):
    keys = make(roster)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"made: {keys / 'paris'}, valid for 90 days; carry it to paris's machine")
    assert said[-1].startswith(f"{keys / 'ca-key.pem'} signs for any name of test: no island needs it")


def test_an_added_island_gets_keys_of_the_same_authority_and_other_keys_are_kept(roster, capsys):
    keys = make(roster)
    before = contents(keys)
    roster.write_text(ROSTER + ROME)
    make(roster)
    assert "kept as they are: paris, berlin" in capsys.readouterr().out
    after = contents(keys)
    assert before.items() <= after.items()
    assert {path.relative_to(keys).parts[0] for path in after.keys() - before.keys()} == {"rome"}
    assert load_keys(keys / "rome", "rome").authority == load_keys(keys / "paris", "paris").authority


def test_replace_overwrites_the_keys_of_the_named_islands_only(roster):
    keys = make(roster)
    before = contents(keys)
    make(roster, "--replace=berlin")
    changed = {path.relative_to(keys).as_posix() for path, content in contents(keys).items() if before[path] != content}
    assert changed == {"berlin/cert.pem", "berlin/key.pem"}
    load_keys(keys / "berlin", "berlin")


def test_keys_made_anew_replace_those_of_a_clock_that_was_put_back(roster, monkeypatch):
    now, newest = time.time_ns, Newest(None)
    monkeypatch.setattr(time, "time_ns", lambda: now() + 6 * 3600 * 10**9)
    keys = make(roster)
    monkeypatch.setattr(time, "time_ns", now)
    assert newest.admits("paris", issue_of(load_keys(keys / "paris", "paris")))
    make(roster, "--replace=paris")
    assert newest.admits("paris", issue_of(load_keys(keys / "paris", "paris")))


def test_keys_are_made_once_a_full_disk_has_room_again():
    with small_disk(400) as disk:
        (disk.folder / "roster.toml").write_text(ROSTER)
        for more in ([], ["--replace=paris"]):
            disk.fill()
            before = contents(disk.folder)
            with pytest.raises(TransientError, match=r"no space left on device: make room, and give .* again"):
                make(disk.folder / "roster.toml", *more)
            assert contents(disk.folder) == before
            disk.empty()
            load_keys(make(disk.folder / "roster.toml", *more) / "paris", "paris")


def test_the_authority_key_is_needed_only_for_signing(roster):
    keys = make(roster)
    (keys / "ca-key.pem").rename(roster.parent / "safe")
    make(roster)  # nothing to sign
    roster.write_text(ROSTER + ROME)
    with pytest.raises(UserError, match=r"ca-key.pem is missing: bring it back to sign with"):
        make(roster)
    assert not (keys / "rome").exists()
    (roster.parent / "safe").rename(keys / "ca-key.pem")
    make(roster)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--days=0"], "--days=0: give 1 to 3650"),
        (["--replace=pari"], "has no island 'pari': did you mean 'paris'"),
        (["--replace"], "expected one argument"),
    ],
)
def test_an_invalid_flag_is_refused_and_no_keys_are_written(arguments, said, roster):
    with pytest.raises(UserError, match=said):
        make(roster, *arguments)
    assert not (roster.parent / "keys").exists()


def test_an_incomplete_key_folder_is_refused_and_left_unchanged(roster):
    keys = make(roster)
    (keys / "paris/key.pem").unlink()
    before = contents(keys)
    with pytest.raises(UserError, match="paris is there, but not with all of an island's keys"):
        make(roster)
    assert contents(keys) == before
    make(roster, "--replace=paris")
    load_keys(keys / "paris", "paris")


def store(folder: Path, ca: trustme.CA, name: str, **validity) -> Path:
    folder.mkdir()
    for file, content in zip(("ca.pem", "cert.pem", "key.pem"), keys_of(ca, name, **validity)[:3], strict=True):
        assert isinstance(content, bytes)
        (folder / file).write_bytes(content)
        (folder / file).chmod(0o600)
    return folder


def test_keys_made_by_another_tool_are_accepted(tmp_path):
    ca = trustme.CA(key_type=trustme.KeyType.RSA)
    folder = store(tmp_path / "keys", ca, "paris", key_type=trustme.KeyType.RSA)
    assert load_keys(folder, "paris").authority == ca.cert_pem.bytes()


def test_unusable_keys_are_refused_at_load_with_the_reason(tmp_path):
    ca, foreign = trustme.CA(), trustme.CA()
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now()

    def refused(folder: Path, said: str) -> None:
        with pytest.raises(UserError, match=said) as error:
            load_keys(folder, "paris")
        assert str(folder) in str(error.value) and "\n" not in str(error.value)

    refused(store(tmp_path / "a", ca, "berlin"), "is made out to berlin, not to paris")
    refused(store(tmp_path / "b", ca, "paris", not_before=now - 3 * day, not_after=now - day), "cert.pem expired on 20")
    refused(store(tmp_path / "c", ca, "paris", not_before=now + 2 * day), "is valid only from 20")
    folder = store(tmp_path / "d", ca, "paris")
    (folder / "ca.pem").write_bytes(foreign.cert_pem.bytes())
    refused(folder, "is not of this run's authority but of 'OU=Testing CA")
    folder = store(tmp_path / "e", ca, "paris")
    (folder / "key.pem").write_bytes(keys_of(ca, "paris").key)
    refused(folder, "key.pem is not the key of ")
    (folder / "key.pem").write_text("no key")
    refused(folder, "key.pem is no private key in PEM")
    (folder / "cert.pem").write_text("no certificate")
    refused(folder, "cert.pem is no certificate in PEM")
    (folder / "cert.pem").unlink()
    refused(folder, "cert.pem cannot be read")


def test_a_certificate_that_is_not_valid_yet_points_to_the_clock(tmp_path):
    later = datetime.datetime.now() + datetime.timedelta(days=2)
    with pytest.raises(UserError, match="set this machine's clock if it is behind, else have a new one made"):
        load_keys(store(tmp_path / "keys", trustme.CA(), "paris", not_before=later), "paris")


def test_a_key_that_others_can_read_is_refused(tmp_path):
    folder = store(tmp_path / "keys", trustme.CA(), "paris")
    for mode in (0o640, 0o604):
        (folder / "key.pem").chmod(mode)
        with pytest.raises(UserError, match=r"others can read .*key.pem: chmod 600 it"):
            load_keys(folder, "paris")


def test_expiry_is_warned_of_in_the_last_third_of_a_certificates_validity(tmp_path):
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    for days, warned in ((29, True), (31, False)):
        validity = {"not_before": now - (90 - days) * day, "not_after": now + days * day}
        folder = store(tmp_path / str(days), trustme.CA(), "paris", **validity)
        line = expiry_warning(load_keys(folder, "paris"), "paris")
        assert (line is not None) is warned
        assert not warned or re.search(r"paris's certificate expires on .*`island keys --replace=paris`", line or "")


def test_a_server_refuses_a_replaced_client_certificate_also_after_a_restart(roster):
    """The server tells certificates of one island apart by their first DNS name alone."""
    keys = make(roster)
    old = load_keys(keys / "berlin", "berlin")
    make(roster, "--replace=berlin")
    new = load_keys(keys / "berlin", "berlin")
    paris = load_keys(keys / "paris", "paris")
    for seen in (False, True):
        with running(Recorder(), paris) as server:
            if not seen:
                assert calling(server.port, old).action("status", {}, 60.0)
                assert calling(server.port, new).action("status", {}, 60.0)
            with pytest.raises(RefusedError, match="a certificate of berlin that another has replaced"):
                calling(server.port, old).action("status", {}, 60.0)
            assert calling(server.port, new).action("status", {}, 60.0)


def test_a_client_refuses_and_names_a_server_with_a_replaced_certificate(roster):
    """Another process listens at paris's address with its old keys."""
    keys = make(roster)
    old, berlin, newest = load_keys(keys / "paris", "paris"), load_keys(keys / "berlin", "berlin"), Newest(None)
    make(roster, "--replace=paris")
    new = load_keys(keys / "paris", "paris")
    assert newest.admits("paris", issue_of(new))
    for shown in (old, new):
        with running(Recorder(), shown) as server:
            client = Client(roster_at([server.port]), "berlin", berlin, "paris", newest=newest)
            if shown is new:
                assert client.action("status", {}, 60.0)
            else:
                with pytest.raises(RefusedError, match=r"paris .* certificate is one that another has replaced"):
                    client.action("status", {}, 60.0)


def test_a_client_accepts_a_newer_server_certificate_from_the_second_call_on(roster):
    keys = make(roster)
    old, berlin, newest = load_keys(keys / "paris", "paris"), load_keys(keys / "berlin", "berlin"), Newest(None)
    assert newest.admits("paris", issue_of(old))
    make(roster, "--replace=paris")
    with running(Recorder(), load_keys(keys / "paris", "paris")) as server:
        client = Client(roster_at([server.port]), "berlin", berlin, "paris", newest=newest)
        with pytest.raises(UnreachableError, match="shows a newer certificate"):
            client.action("status", {}, 60.0)
        assert client.action("status", {}, 60.0)
    with running(Recorder(), old) as server:
        client = Client(roster_at([server.port]), "berlin", berlin, "paris", newest=newest)
        with pytest.raises(RefusedError, match="another has replaced"):
            client.action("status", {}, 60.0)


def test_a_client_remembers_a_servers_certificate_and_refuses_an_older_one(roster):
    keys = make(roster)
    old, berlin, newest = load_keys(keys / "paris", "paris"), load_keys(keys / "berlin", "berlin"), Newest(None)
    make(roster, "--replace=paris")
    for shown in (load_keys(keys / "paris", "paris"), old):
        with running(Recorder(), shown) as server:
            client = Client(roster_at([server.port]), "berlin", berlin, "paris", newest=newest)
            if shown is old:
                with pytest.raises(RefusedError, match="another has replaced"):
                    client.action("status", {}, 60.0)
            else:
                assert client.action("status", {}, 60.0)
                assert newest.issue_of("paris") == issue_of(shown)


@pytest.mark.parametrize("content", ["{", "[1]", '{"paris": "soon"}', '{"paris": null}'])
def test_a_damaged_list_of_newest_certificates_is_reported(tmp_path, content):
    (tmp_path / "newest.json").write_text(content)
    with pytest.raises(UserError, match=r"newest.json is damaged: delete it"):
        Newest(tmp_path)


def test_a_running_island_reloads_renewed_keys_and_keeps_exchanging(roster, monkeypatch):
    monkeypatch.setattr(network, "_KEYS_SECONDS", 0.2)
    keys = make(roster)
    names = ("paris", "berlin")
    listed = on_loopback(*names)
    settings = Settings(patience=40)  # short rounds, which do not get longer on a busy machine
    sites = [Site(name, listed, settings=settings, credentials=load_keys(keys / name, name)) for name in names]
    side_by_side(*[site.open for site in sites])
    side_by_side(*[lambda site=site: site.train(2, 0.3) for site in sites])
    make(roster, "--replace=paris")
    assert in_time(lambda: any("paris has read new keys" in line for line in sites[0].lines))
    side_by_side(*[lambda site=site: site.train(6, 0.5) for site in sites])
    side_by_side(*[site.close for site in sites])
    assert all(site.share(5) == 1 for site in sites), sites[0].met


@contextlib.contextmanager
def open_network(roster: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Path, list[str]]]:
    """Yield the network of paris, which looks at its keys ten times a second, their folder, and the lines told."""
    monkeypatch.setattr(network, "_KEYS_SECONDS", 0.1)
    keys = make(roster) / "paris"
    lines: list[str] = []
    opened = network.Network(roster_at([]), "paris", load_keys(keys, "paris"), lines.append)
    opened.open(Recorder().handlers)
    try:
        yield opened, keys, lines
    finally:
        opened.close()


def test_new_keys_that_cannot_be_taken_are_told_once_with_the_reason(roster, monkeypatch):
    with open_network(roster, monkeypatch) as (_, keys, lines):
        make(roster, "--replace=paris")
        (keys / "key.pem").chmod(0o644)
        assert in_time(lambda: any("goes on with its old keys: others can read" in line for line in lines)), lines
        time.sleep(0.5)
        assert sum("goes on with its old keys" in line for line in lines) == 1
        (keys / "key.pem").chmod(0o600)
        assert in_time(lambda: "has read new keys" in lines[-1])


def test_an_island_that_could_not_listen_with_new_keys_tries_again(roster, monkeypatch):
    flight, refused = server_module._Flight, iter([True] * (server_module._TRIES * 2))

    def listening(*arguments: Any) -> Any:
        if next(refused, False):
            raise RuntimeError("port in use")
        return flight(*arguments)

    with open_network(roster, monkeypatch) as (opened, keys, lines):
        monkeypatch.setattr(server_module, "_Flight", listening)
        monkeypatch.setattr(server_module.time, "sleep", lambda seconds: None)
        make(roster, "--replace=paris")
        assert in_time(lambda: bool(lines) and "has read new keys" in lines[-1], 60)
        assert any("nobody can call it, as it cannot listen" in line for line in lines)
        assert calling(opened.roster.address("paris").port, load_keys(keys.parent / "berlin", "berlin")).action(
            "status", {}, 60.0
        )


def test_keys_are_optional_only_if_all_islands_are_on_one_machine(roster, tmp_path):
    assert credentials_for(roster_at([7070, 7071]), "paris", None) is None
    with pytest.raises(UserError, match=r"paris at paris.example.org:7070 can be reached from other machines: give"):
        credentials_for(read_roster(roster), "berlin", None)
    keys = make(roster)
    assert credentials_for(read_roster(roster), "berlin", keys / "berlin") is not None
    with pytest.raises(UserError, match="no island 'x'"):
        credentials_for(roster_at([7070, 7071]), "x", None)
