"""Folder of a run's keys: its authority's, and a folder for each island to carry to its machine.

keys/ca.pem, keys/ca-key.pem             the authority; its key is needed only to add islands
keys/signing.lock                        held by a command that signs, so that another one waits
keys/paris/ca.pem, cert.pem, key.pem     what paris needs, and nobody else
"""

import contextlib
import datetime
import fcntl
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from noloco_jax.errors import UserError
from noloco_jax.files import full_disk_reported
from noloco_jax.islands.certificates import (
    fault_of,
    make_authority,
    make_certificate,
    names_of,
    owner_and_issue,
    pem_of,
    pem_of_key,
)
from noloco_jax.islands.roster import MEMBERS_FILE, Roster, newest, read_run

AUTHORITY, AUTHORITY_KEY = "ca.pem", "ca-key.pem"  # no island can have these names, as names have no dot
CERTIFICATE, KEY = "cert.pem", "key.pem"
_LOCK = "signing.lock"


class Credentials(NamedTuple):
    """Credentials of an island, as PEM.

    Attributes:
      authority: the run's certificate authority.
      certificate: the island's own, signed by it.
      key: the private key of that.
      folder: where they came from.
    """

    authority: bytes
    certificate: bytes
    key: bytes
    folder: Path | None = None


def make_keys(roster: Roster, folder: Path, days: int, replace: Collection[str] = ()) -> list[str]:
    """Make the authority and the keys of every island that has none, and return their names.

    The islands in `replace` get new ones, beside what else is in their folders. What others have is never written over.
    Raises `UserError` if an island's folder is incomplete, or the authority's key is not there to sign with, or has
    expired.
    """
    for name in replace:
        roster.member(name)
    missing = [name for name in roster.names if name in replace or not _complete(folder / name)]
    if not missing:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    authority, key = _authority(folder, roster.run)
    for name in missing:
        certificate, own_key = make_certificate(name, days, authority, key, issue_in(folder / name))
        if fault := fault_of(certificate, authority, name):
            raise UserError(f"{folder / AUTHORITY} cannot sign for {name}: the certificate {fault}")
        unfinished = folder / f".{name}.{os.getpid()}.tmp"
        try:
            unfinished.mkdir(mode=0o700)
            (unfinished / AUTHORITY).write_bytes(pem_of(authority))
            (unfinished / CERTIFICATE).write_bytes(pem_of(certificate))
            _write_secret(unfinished / KEY, pem_of_key(own_key))
            if name in replace and (folder / name).exists():
                for file in (folder / name).iterdir():
                    if file.is_file() and not (unfinished / file.name).exists():
                        shutil.copy2(file, unfinished)
        except OSError:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        if name in replace and (folder / name).exists():
            shutil.rmtree(folder / name)
        unfinished.rename(folder / name)
    return missing


@contextlib.contextmanager
def signing_alone(folder: Path) -> Iterator[None]:
    """Hold a folder of keys, while another command waits: two at once would give two members one number.

    Where the file system has no locks, or the folder is not there yet, nothing is held.
    Raises `TransientError` where the disk is full.
    """
    with contextlib.ExitStack() as stack, full_disk_reported(folder, "and give the same command again"):
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context((folder / _LOCK).open("wb")), fcntl.LOCK_EX)
        yield


def authority_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key of the authority in a folder of keys; raise `UserError` where it is missing or another."""
    return _authority(folder, "")[1]


def load_keys(folder: Path, name: str) -> Credentials:
    """Load an island's keys, checked as peers will check them.

    Raises `UserError` if a file is missing or damaged, others can read the key, it is not the certificate's, or the
    certificate is not of the authority beside it, has expired, or is made out to another island.
    """
    paths = [folder / file for file in (AUTHORITY, CERTIFICATE, KEY)]
    try:
        authority_pem, certificate_pem, key_pem = (path.read_bytes() for path in paths)
        contents = Credentials(authority_pem, certificate_pem, key_pem, folder)
        mode = paths[2].stat().st_mode
    except OSError as error:
        hint = f"give the folder that `island keys` made for {name}"
        raise UserError(f"{error.filename} cannot be read ({error.strerror}): {hint}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise UserError(f"others can read {paths[2]}: chmod 600 it, and have a new one made if anybody may have")
    authority = _load_certificate(paths[0], contents.authority)
    certificate = _load_certificate(paths[1], contents.certificate)
    if _load_key(paths[2], contents.key).public_key() != certificate.public_key():
        raise UserError(f"{paths[2]} is not the key of {paths[1]}: take both from the same folder of `island keys`")
    if fault := fault_of(certificate, authority, name):
        early = datetime.datetime.now(datetime.UTC) < certificate.not_valid_before_utc  # a new one would be, too
        first = "set this machine's clock if it is behind, else " if early else ""
        raise UserError(f"{paths[1]} {fault}: {first}have a new one made with `island keys --replace={name}`")
    return contents


def expiry_warning(credentials: Credentials, name: str) -> str | None:
    """Return a line where less than a third of the time of an island's certificate is left, or None."""
    certificate = x509.load_pem_x509_certificate(credentials.certificate)
    now, end = datetime.datetime.now(datetime.UTC), certificate.not_valid_after_utc
    if 3 * (end - now) >= end - certificate.not_valid_before_utc:
        return None
    return (
        f"{name}'s certificate expires on {end:%Y-%m-%d %H:%M} UTC: make a new one with "
        f"`island keys --replace={name}`, copy it over {credentials.folder or 'the old'}, and start {name} again"
    )


def owner_of(folder: Path, roster: Roster) -> str:
    """Return the island to which a folder's certificate is made out.

    Raises `UserError` if it cannot be read, or is to none of the roster.
    """
    path = folder / CERTIFICATE
    try:
        certificate = _load_certificate(path, path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): give the members.json that `island invite` wrote beside the "
            "island's keys, or the folder of these as --keys"
        ) from None
    names = [owner_and_issue(name)[0] for name in names_of(certificate)]
    owners = [name for name in names if name in roster.names]
    if not owners:
        raise UserError(f"{path} is made out to no island of {roster.run}: give the keys of one")
    return owners[0]


def check_loopback(roster: Roster) -> None:
    """Raise `UserError` where an address can be reached from elsewhere, so that keys are needed."""
    for island in roster.members:
        if not island.address.is_loopback:
            raise UserError(
                f"{island.name} at {island.address} can be reached from other machines: give --keys=FOLDER "
                "(python -m noloco_jax.island keys makes them)"
            )


def authority_in(folder: Path | None) -> bytes | None:
    """Return the certificate of the run's authority in a folder of keys, or None."""
    path = None if folder is None else folder / AUTHORITY
    return path.read_bytes() if path is not None and path.exists() else None


def open_membership(
    roster: Path | Roster, name: str, keys: Path | None, workdir: Path
) -> tuple[Roster, Credentials | None]:
    """Return the newest roster that an island knows, and its keys; None where all islands are on this machine.

    Raises `UserError` as `read_run`, `load_keys` and `newest`, for an unknown name, and where keys are needed.
    """
    authority = authority_in(keys)
    if not isinstance(roster, Roster):
        roster = read_run(roster, authority)
    roster.member(name)
    if keys is None:
        check_loopback(roster)
    credentials = None if keys is None else load_keys(keys, name)
    return newest(workdir / MEMBERS_FILE, roster, authority), credentials


def issue_in(folder: Path) -> int:
    """Return when the certificate in a folder was made, in milliseconds; 0 where there is none that says so."""
    try:
        names = names_of(x509.load_pem_x509_certificate((folder / CERTIFICATE).read_bytes()))
    except (OSError, ValueError):
        return 0
    return max((owner_and_issue(name)[1] for name in names), default=0)


def _complete(folder: Path) -> bool:
    """Return whether an island's keys are all there.

    Raises `UserError` where only some are.
    """
    there = [(folder / file).exists() for file in (AUTHORITY, CERTIFICATE, KEY)]
    if folder.exists() and not all(there):
        raise UserError(f"{folder} is there, but not with all of an island's keys: move it aside, or --replace it")
    return all(there)


def _authority(folder: Path, run: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Load the run's authority and its key, made when neither is there."""
    certificate_path, key_path = folder / AUTHORITY, folder / AUTHORITY_KEY
    if not certificate_path.exists() and not key_path.exists():
        authority, key = make_authority(run)
        try:
            _write_secret(key_path, pem_of_key(key))
            certificate_path.write_bytes(pem_of(authority))
        except OSError:  # nothing is signed with it yet
            for path in (key_path, certificate_path):
                path.unlink(missing_ok=True)
            raise
        return authority, key
    for path in (certificate_path, key_path):
        if not path.exists():
            raise UserError(f"{path} is missing: bring it back to sign with, or give a new folder to make all anew")
    key = _load_key(key_path, key_path.read_bytes())
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{key_path} is not the key that `island keys` made: bring that back to sign with")
    return _load_certificate(certificate_path, certificate_path.read_bytes()), key


def _write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can ever read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _load_certificate(path: Path, content: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError:
        raise UserError(f"{path} is no certificate in PEM: take it from where `island keys` made it") from None


def _load_key(path: Path, content: bytes) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise UserError(f"{path} is no private key in PEM without a password: take that of `island keys`") from None
