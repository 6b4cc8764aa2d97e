"""Certificates for a server that listens beyond loopback: torchLoom's own authority, and one certificate signed by it.

Other machines trust exactly this authority, whose certificate is part of the join token. Its key stays here, so that a
certificate about to expire is replaced without the other machines.

Import this module where it is used: it needs cryptography, which is an optional dependency.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from torchloom.bus.state_folder import StateFolder, write_private
from torchloom.errors import BadInput, BadState
from torchloom.shared.addresses import EVERY_ADDRESS

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID
except ImportError:
    raise BadInput(
        "TLS certificates need the cryptography package",
        hint="pip install 'torchloom[tls]', or pass --tls-cert and --tls-key",
    ) from None

VALID = timedelta(days=365)
RENEW = timedelta(days=30)
"""A certificate that expires sooner than this is replaced."""
_AUTHORITY_VALID = timedelta(days=3650)


def ensure_tls(folder: StateFolder, host: str) -> tuple[Path, Path]:
    """Certificate and key for a server on `host`, created or renewed if necessary."""
    folder.make()
    cert, key = folder.tls / "server.pem", folder.tls / "server.key"
    authority, authority_key = _ensure_authority(folder)
    names = names_of(host)
    if not (key.exists() and _still_good(cert, authority, names)):
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(signs=False), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (x509.SubjectAlternativeName([_general_name(name) for name in names]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False),
        ]
        _issue(cert, key, host, VALID, extensions, (authority, authority_key))
    return cert, key


def names_of(host: str) -> list[str]:
    """Every name under which clients may reach a server that listens on `host`."""
    names = [host] if host not in EVERY_ADDRESS else _own_addresses()
    names += ["localhost", "127.0.0.1", "::1", socket.gethostname()]
    with contextlib.suppress(OSError):
        names.append(socket.getfqdn())
    # Host names are free text on some machines, and a certificate can contain ASCII only.
    return list(dict.fromkeys(name for name in names if name and name.isascii()))


def expires(cert: Path) -> datetime:
    """When a certificate ends."""
    return _load(cert).not_valid_after_utc


def covers(cert: Path, host: str) -> bool:
    """Whether a client that asks for `host` would accept this certificate."""
    return host in _names_in(_load(cert))


def _ensure_authority(folder: StateFolder) -> tuple[x509.Certificate, Any]:
    path, key_path = folder.tls / "ca.pem", folder.tls / "ca.key"
    if path.exists() and key_path.exists():
        try:
            authority, key = _load(path), serialization.load_pem_private_key(key_path.read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise BadState(
                f"the TLS authority in {folder.tls} cannot be used: {error}",
                hint=f"remove {folder.tls}, run `loom up` again, and join the other machines again",
            ) from error
        if authority.not_valid_after_utc - datetime.now(UTC) > RENEW:
            return authority, key
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    name = f"torchLoom of {socket.gethostname()}"
    return _issue(path, key_path, name, _AUTHORITY_VALID, [(constraints, True), (_usage(signs=True), True)])


def _issue(
    path: Path,
    key_path: Path,
    name: str,
    valid: timedelta,
    extensions: list[tuple[x509.ExtensionType, bool]],
    issuer: tuple[x509.Certificate, Any] | None = None,
) -> tuple[x509.Certificate, Any]:
    """A new key and its certificate, signed by the issuer or else by itself, written to these files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # another machine's clock may be behind
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    certificate = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    write_private(key_path, key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    write_private(path, certificate.public_bytes(pem))
    return certificate, key


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, key_agreement=False, key_encipherment=False,
        content_commitment=False, data_encipherment=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _still_good(cert: Path, authority: x509.Certificate, names: list[str]) -> bool:
    try:
        certificate = _load(cert)
        certificate.verify_directly_issued_by(authority)
    except Exception:  # noqa: BLE001  missing, damaged or signed by another authority: it is replaced
        return False
    return certificate.not_valid_after_utc - datetime.now(UTC) > RENEW and set(names) <= _names_in(certificate)


def _load(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadState(f"the certificate {path} cannot be read: {error}") from error


def _names_in(certificate: x509.Certificate) -> set[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return {str(name.value) for name in names}


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _own_addresses() -> list[str]:
    import psutil

    families = {socket.AF_INET, socket.AF_INET6}
    addresses = [a.address for card in psutil.net_if_addrs().values() for a in card if a.family in families]
    return sorted(address for address in addresses if "%" not in address)  # no link-local addresses
