"""Certificates of a run's islands, their own certificate authority, and checks of a certificate.

An island's certificate has two subject alternative names: its name with the millisecond in which it was made, by which
peers know the newest, and its name alone. The host is left out: an island then keeps its certificate on another
machine, and none can pass for another by the host that it runs on.
"""

import datetime
import time

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_EARLIER = datetime.timedelta(days=1)  # certificates are valid from a day ago, as other machines' clocks may be behind
_AUTHORITY_DAYS = 3650


def make_authority(run: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Make a certificate authority for one run, valid for ten years, and its private key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"islands of {run}"[:64])])
    certificate = (
        _builder(name, name, key.public_key(), _AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def make_certificate(
    name: str, days: int, authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, former: int = 0
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Make an island's certificate, for both ends of a connection, and its private key.

    It says that it was made after `former`, the millisecond in which the last one was, also where a clock was put back.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    ends = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    names = [f"{name}.{max(time.time_ns() // 1_000_000, former + 1)}", name]
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _builder(subject, authority.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(list(map(x509.DNSName, names))), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(ends), critical=False)
        .add_extension(signer, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return certificate, key


def fault_of(certificate: x509.Certificate, authority: x509.Certificate, name: str) -> str | None:
    """Return the fault of a certificate as that of island `name`, such as "expired on 2026-01-31", or None."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return f"is not of this run's authority but of {certificate.issuer.rfc4514_string()[:80]!r}"
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        return f"expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
    if now < certificate.not_valid_before_utc:
        return f"is valid only from {certificate.not_valid_before_utc:%Y-%m-%d} on, and here it is {now:%Y-%m-%d}"
    owners = [owner_and_issue(one)[0] for one in names_of(certificate)]
    if owners[:1] != [name]:  # a server identifies its callers by the first name
        return f"is made out to {', '.join(dict.fromkeys(owners)) or 'nobody'}, not to {name}"
    return None


def owner_and_issue(name: str) -> tuple[str, int]:
    """Return the island and the millisecond of issue from a certificate's first name; 0 for keys of another maker."""
    owner, _, issue = name.partition(".")
    return (owner, int(issue)) if issue.isascii() and issue.isdigit() else (name, 0)


def names_of(certificate: x509.Certificate) -> list[str]:
    """Return the DNS names that a certificate is made out to."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return names.get_values_for_type(x509.DNSName)


def pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Encode a private key as PEM, without a password: its file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def pem_of(certificate: x509.Certificate) -> bytes:
    """Encode a certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    return x509.KeyUsage(digital_signature=digital_signature, key_cert_sign=key_cert_sign, crl_sign=crl_sign, **unused)


def sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
    """Sign with the authority's key."""
    return key.sign(content, ec.ECDSA(hashes.SHA256()))


def is_signed(authority_pem: bytes, content: bytes, signature: bytes) -> bool:
    """Return whether the authority with this certificate has signed `content`."""
    key = x509.load_pem_x509_certificate(authority_pem).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    try:
        key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True
