"""Tokens and a certificate for TLS, which a server needs that others can reach."""

from __future__ import annotations

import ssl
from collections.abc import Collection
from ipaddress import ip_address

from pybk.admin.http.tokens import Token
from pybk.credentials import read_secret_file
from pybk.errors import UsageError


def checked_context(
    host: str, tokens: Collection[Token], certificate: tuple[str, str] | None, *, of_bookie: bool
) -> ssl.SSLContext | None:
    """Return the TLS context for an address, None without TLS; raises UsageError as ``AdminServer``."""
    probes_alone = of_bookie and not tokens
    if not is_loopback(host) and not probes_alone and (not tokens or certificate is None):
        raise UsageError(
            f"others could reach {host!r}, so tokens and a certificate are needed: give them, or use 127.0.0.1"
        )
    return None if certificate is None else context_of(certificate)


def context_of(certificate: tuple[str, str]) -> ssl.SSLContext:
    """Return a new context for a certificate, because a context in use would lose its key if the new one is wrong."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    read_secret_file(certificate[1], private=True)
    try:
        context.load_cert_chain(*certificate, password="")  # a service cannot be asked for one
    except (OSError, ValueError) as error:
        named, key = certificate
        raise UsageError(f"the certificate {named!r} with key {key!r} cannot be used: {error}") from error
    return context


def is_loopback(host: str) -> bool:
    """Return whether this host alone can reach an address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
