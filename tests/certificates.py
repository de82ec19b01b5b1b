"""Certificates for tests of TLS: an authority, and what it signs, in PEM files."""

from __future__ import annotations

import datetime as dt
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


class Authority:
    """An authority that signs certificates.

    Args:
        directory: Where the files are written.
        name: Its name, also of its file.

    Attributes:
        file: Its certificate.
    """

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self._directory = directory
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            self._builder(name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.file = directory / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def sign(self, name: str, *, host: str = "127.0.0.1", password: bytes | None = None) -> Path:
        """Make a key and its certificate, for a host's name or address; returns its owner's file that has both."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            alternative: x509.GeneralName = x509.IPAddress(IPv4Address(host))
        except ValueError:
            alternative = x509.DNSName(host)
        certificate = (
            self._builder(name, key.public_key())
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        protection = (
            serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
        )
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, protection)
        file = self._directory / f"{name}.pem"
        file.touch(0o600)
        file.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
        return file

    def _builder(self, name: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = dt.datetime.now(dt.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_name(name))
            .issuer_name(_name(self._name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=7))
        )
