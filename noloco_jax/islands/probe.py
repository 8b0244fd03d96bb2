"""Diagnosis of an island that cannot be reached: Flight has one error for a dead port and for all faults of keys.

A plain connection, and a TLS handshake that accepts any certificate and then checks it, tell them apart.
"""

import contextlib
import errno
import socket
import ssl
import tempfile
from pathlib import Path

from cryptography import x509

from noloco_jax.islands.certificates import fault_of, names_of, owner_and_issue
from noloco_jax.islands.keys import Credentials, Newest
from noloco_jax.islands.peer_errors import PeerError, RefusedError, UnreachableError
from noloco_jax.islands.roster import Address

_SECONDS = 3.0


def why_unreachable(
    peer: str, address: Address, credentials: Credentials | None, newest: Newest | None = None
) -> PeerError:
    """Try the steps of a connection one by one, up to 3 seconds each, and return the error of the first that fails.

    A newer certificate of the peer is added to `newest`, so that the next call knows it.
    """
    where = f"{peer} at {address}"
    try:
        connection = _connected(peer, address, credentials)
    except socket.gaierror as error:
        return UnreachableError(f"{where}: no such host ({error.strerror}): correct the roster, or the name service")
    except TimeoutError:
        return UnreachableError(f"{where} does not answer: the machine or the network is away")
    except OSError as error:
        nobody = error.errno == errno.ECONNREFUSED
        return UnreachableError(f"{where}: {'nobody listens there' if nobody else error.strerror}")
    with connection:
        return _why_no_call(where, peer, connection, credentials, newest)


def learn_issue(peer: str, address: Address, credentials: Credentials, newest: Newest) -> None:
    """Add the certificate that a peer shows, if it is one of this run, to `newest`."""
    with contextlib.suppress(OSError, ValueError), _connected(peer, address, credentials) as connection:
        connection.do_handshake()
        shown = x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"")
        if fault_of(shown, x509.load_pem_x509_certificate(credentials.authority), peer) is None:
            newest.admits(peer, owner_and_issue(names_of(shown)[0])[1])


def _why_no_call(
    where: str, peer: str, connection: ssl.SSLSocket, credentials: Credentials | None, newest: Newest | None
) -> PeerError:
    """Diagnose a port that takes connections."""
    try:
        connection.getpeername()  # raises if the connection was reset
        connection.do_handshake()
        if credentials is None:
            return RefusedError(f"{where} asks for keys: give --keys here, or start it without")
        shown = x509.load_der_x509_certificate(connection.getpeercert(binary_form=True) or b"")
        if fault := fault_of(shown, x509.load_pem_x509_certificate(credentials.authority), peer):
            return RefusedError(f"{where}: its certificate {fault}")
        issue = owner_and_issue(names_of(shown)[0])[1]
        if newest is not None and issue != newest.issue_of(peer) != 0:
            if newest.admits(peer, issue):
                return UnreachableError(f"{where} shows a newer certificate, and is called with that from now on")
            return RefusedError(
                f"{where}: its certificate is one that another has replaced: give {peer} its new keys, and find "
                "out who else may have the old ones"
            )
        # In TLS 1.3 the peer checks this side's certificate after the handshake is over here.
        if connection.recv(1):
            return UnreachableError(f"{where} answers now, but did not before: it has just come, or was busy")
        mine = x509.load_pem_x509_certificate(credentials.certificate)
        owner = owner_and_issue((names_of(mine) or [""])[0])[0]
        fault = fault_of(mine, x509.load_pem_x509_certificate(credentials.authority), owner)
        reason = fault or "is right by the clock and the authority here, so that one of the two differs over there"
        return RefusedError(f"{where} closes on this island's certificate, which {reason}")
    except TimeoutError:
        return UnreachableError(
            f"{where} takes connections and says nothing: it is stopped, overloaded or not an island"
        )
    except (OSError, ValueError) as error:  # include every failure of TLS
        if credentials is None or getattr(error, "errno", None) == errno.ENOTCONN:
            return UnreachableError(f"{where} does not take the call: it is starting, stopping or not an island")
        reason = getattr(error, "reason", None) or str(error)
        return RefusedError(
            f"{where} does not speak TLS as islands do ({reason}): it has no --keys, or is not an island"
        )


def _connected(peer: str, address: Address, credentials: Credentials | None) -> ssl.SSLSocket:
    """Connect a socket whose TLS handshake is still to come.

    It is made for TLS before it connects: `ssl` leaves one that is reset between the two to the garbage collector.
    """
    context = _any_certificate(credentials)
    places = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    for tried, (family, kind, protocol, _, place) in enumerate(places, start=1):
        plain = socket.socket(family, kind, protocol)
        plain.settimeout(_SECONDS)
        connection = context.wrap_socket(plain, do_handshake_on_connect=False, server_hostname=peer)
        try:
            connection.connect(place)
            return connection
        except OSError:
            connection.close()
            if tried == len(places):
                raise
    raise OSError(f"{address.host} has no address")


def _any_certificate(credentials: Credentials | None) -> ssl.SSLContext:
    """Make a TLS context that shows this island's certificate, and accepts any from the other side."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if credentials is not None:
        with tempfile.TemporaryDirectory() as folder:  # readable by its owner only; `ssl` accepts only paths
            path = Path(folder) / "certificate-and-key.pem"
            path.write_bytes(credentials.certificate + credentials.key)
            context.load_cert_chain(path)
    return context
