"""Keys of a run: the command that makes them, how an island loads them, and how replaced ones are revoked."""

import datetime
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import trustme

from noloco_jax.errors import TransientError, UserError
from noloco_jax.islands.command import main as island
from noloco_jax.islands.keys import Credentials, expiry_warning, issue_in, load_keys, open_membership
from noloco_jax.islands.roster import MEMBERS_FILE, read_members
from support.disks import small_disk
from support.served import roster_at

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


def keys_of(ca: trustme.CA, name: str, **validity) -> Credentials:
    """Return keys that another tool has made."""
    leaf = ca.issue_cert(name, **validity)
    chain = b"".join(pem.bytes() for pem in leaf.cert_chain_pems)
    return Credentials(ca.cert_pem.bytes(), chain, leaf.private_key_pem.bytes())


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


def test_replaced_keys_are_revoked_in_the_next_version_of_the_roster(roster, capsys):
    keys = make(roster)
    first = read_members(keys / MEMBERS_FILE, "test", (keys / "ca.pem").read_bytes())
    assert first.version == 1 and not any(member.issued for member in first.members)
    make(roster, "--replace=berlin")
    following = read_members(keys / MEMBERS_FILE, "test", (keys / "ca.pem").read_bytes())
    assert following.version == 2
    assert [member.issued for member in following.members] == [0, issue_in(keys / "berlin")]
    assert "roster version 2 is told to nobody: none of the islands answers" in capsys.readouterr().out


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
    refused(
        store(tmp_path / "c", ca, "paris", not_before=now + 2 * day),
        "valid only from .* set this machine's clock",
    )
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


def test_keys_are_optional_only_if_all_islands_are_on_one_machine(roster, tmp_path):
    assert open_membership(roster_at({}), "paris", None, tmp_path)[1] is None
    with pytest.raises(UserError, match=r"paris at paris.example.org:7070 can be reached from other machines: give"):
        open_membership(roster, "berlin", None, tmp_path)
    keys = make(roster)
    assert open_membership(roster, "berlin", keys / "berlin", tmp_path)[1] is not None
    with pytest.raises(UserError, match="no island 'x'"):
        open_membership(roster_at({}), "x", None, tmp_path)
