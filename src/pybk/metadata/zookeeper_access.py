"""Access to a ZooKeeper store: TLS, and the access control lists of the znodes. The URL's query names both.

    tls_ca=FILE        the certificates of the authorities that may have signed a server's certificate (PEM);
                       without it those of the system
    tls_cert=FILE      the certificate of this process (PEM), for servers that ask for one
    tls_key=FILE       its private key, not encrypted; without it the key is in the file of the certificate
    tls_verify=chain   do not compare the server's name with its certificate; the default is "host"
    auth_file=FILE     holds user:password, the identity that all znodes belong to (ZooKeeper's digest scheme)
    acl=x509           all znodes belong to the identity of the certificate of this process

Each of the first four turns TLS on. Without ``auth_file`` the environment variable ``PYBK_ZOOKEEPER_AUTH`` is read. The
files are read when a store is opened, and no URL holds a secret.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl

from kazoo.client import KazooClient
from kazoo.exceptions import AuthFailedError, InvalidACLError, NoAuthError
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.states import KazooState
from kazoo.security import ACL, CREATOR_ALL_ACL, Permissions, make_digest_acl

from pybk.credentials import Secret
from pybk.errors import UsageError
from pybk.metadata.store import StoreUrl

ZOOKEEPER_AUTH: Final = "PYBK_ZOOKEEPER_AUTH"
"""Environment variable of user:password; with ``_FILE`` appended, of the path of a file that holds it."""

_TLS: Final = ("tls_ca", "tls_cert", "tls_key", "tls_verify")
_NAMES: Final = (*_TLS, "auth_file", "acl")  # among those of ``store.SETTINGS``
_X509: Final = "x509"

_RECONNECT: Final = {"max_tries": -1, "delay": 0.05, "backoff": 2, "max_delay": 2.0, "max_jitter": 0.2}

_REMEDIES: Final = (
    ("Hostname mismatch", "name the servers in the URL as their certificates do, or add tls_verify=chain to it"),
    ("IP address mismatch", "name the servers in the URL as their certificates do, or add tls_verify=chain to it"),
    ("CERTIFICATE_VERIFY_FAILED", "tls_ca must name the authority that signed the servers' certificates"),
    ("WRONG_VERSION_NUMBER", "name the port of the servers for TLS (secureClientPort), or leave the tls_ settings out"),
    ("UNEXPECTED_EOF", "name the port of the servers for TLS (secureClientPort), or leave the tls_ settings out"),
    ("ALERT", "the servers refuse the certificate of this process or miss one; check tls_cert and tls_key"),
    ("AUTH_FAILED", "the servers refuse the user and password; check that they allow digest authentication"),
    ("socket connection broken", "if this is their port for TLS, name tls_ca=FILE in the URL"),
)
"""The remedies, by a part of kazoo's message."""


@dataclass(frozen=True, slots=True)
class ZooKeeperAccess:
    """The access to a store; made by ``access_of``.

    Attributes:
        tls: The TLS settings of connections; None for connections without TLS.
        credential: user:password; None for none.
        identity: The owner of the znodes, for messages; empty for everybody.
    """

    tls: ssl.SSLContext | None = None
    credential: str | None = field(default=None, repr=False)
    identity: str = ""

    @property
    def acl(self) -> list[ACL] | None:
        """The access control list of new znodes; None for ZooKeeper's default, by which everybody may do everything."""
        if self.credential is not None:
            user, _, password = self.credential.partition(":")
            return [make_digest_acl(user, password, all=True)]
        return CREATOR_ALL_ACL if self.identity else None

    def matches(self, found: list[ACL]) -> bool:
        """Return whether an access control list is that of the znodes that this process creates."""
        if not self.identity:
            return True
        if self.credential is not None:
            return found == self.acl
        return len(found) == 1 and found[0].perms == Permissions.ALL and found[0].id.scheme == _X509

    def refusal(self, error: Exception) -> str:
        """Return the remedy for an error of access, empty for other errors."""
        if isinstance(error, NoAuthError):
            mine = self.identity or "nobody in particular: the URL has neither auth_file nor acl"
            return f"the znodes belong to another identity than that of this process, {mine}; check the URL's settings"
        if isinstance(error, InvalidACLError):
            return (
                "the servers do not know the certificate of this process as an identity; name their port for TLS, and "
                "set authProvider.x509=org.apache.zookeeper.server.auth.X509AuthenticationProvider there"
            )
        if isinstance(error, AuthFailedError):
            return f"the servers refuse {self.identity}; check that they allow digest authentication"
        return ""


OPEN: Final = ZooKeeperAccess()
"""Access without TLS, and with znodes that everybody may change."""


def access_of(url: StoreUrl) -> ZooKeeperAccess:
    """Return the access to the store of a URL; reads the files that the URL names.

    Raises:
        UsageError: The query is invalid, or a file cannot be read or used.
    """
    given = dict(_settings(url))
    tls = _tls_of(url, given) if any(name in given for name in _TLS) else None
    acl = given.get("acl")
    if acl == _X509:
        if "tls_cert" not in given:
            raise url.invalid(": acl=x509 needs tls_cert=FILE, the certificate whose identity the znodes belong to")
        if "auth_file" in given:
            raise url.invalid(": acl=x509 and auth_file exclude each other")
        return ZooKeeperAccess(tls, identity=f"the certificate {given['tls_cert']}")
    if acl is not None:
        raise url.invalid(": acl takes x509 alone; for a user and password name auth_file=FILE")
    secret = Secret(file=given.get("auth_file"), variable=ZOOKEEPER_AUTH, private=True)
    credential = secret.read()
    if credential is None:
        return ZooKeeperAccess(tls)
    try:
        text = credential.decode()
    except UnicodeDecodeError:
        text = ""
    user, colon, password = text.partition(":")
    if not user or not colon or not password:
        raise UsageError(f"{secret.source} is to hold user:password for ZooKeeper, in UTF-8, and does not")
    return ZooKeeperAccess(tls, text, f"user {user!r} of {secret.source}")


def _settings(url: StoreUrl) -> Iterator[tuple[str, str]]:
    """Yield the settings in a URL's query."""
    seen = set()
    for name, value in parse_qsl(url.parts.query, keep_blank_values=True):
        if name not in _NAMES:
            raise url.invalid(
                f" has an unknown setting: for ZooKeeper there are {', '.join(_NAMES)}; user and password are taken "
                f"from a file (auth_file) or from the environment variable {ZOOKEEPER_AUTH}"
            )
        if not value or name in seen:
            raise url.invalid(f" has the setting {name} {'twice' if name in seen else 'without a value'}")
        seen.add(name)
        yield name, value


def _tls_of(url: StoreUrl, given: dict[str, str]) -> ssl.SSLContext:
    """Return the TLS settings of a URL."""
    verify = given.get("tls_verify", "host")
    if verify not in ("host", "chain"):
        raise url.invalid(": tls_verify takes host or chain; to trust one certificate name it by tls_ca")
    ca, certificate = given.get("tls_ca"), given.get("tls_cert")
    if "tls_key" in given and certificate is None:
        raise url.invalid(": tls_key needs tls_cert=FILE, the certificate of that key")
    try:
        tls = ssl.create_default_context(cafile=ca)
    except OSError as error:  # a bad certificate is an SSLError, which is an OSError
        raise UsageError(f"tls_ca {ca!r} is to hold certificates in PEM, and cannot be used: {error}") from error
    tls.minimum_version = ssl.TLSVersion.TLSv1_2
    tls.check_hostname = verify == "host"
    if certificate is not None:
        key = given.get("tls_key", certificate)
        try:
            tls.load_cert_chain(certificate, key, password=_no_password)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"tls_cert {certificate!r} and tls_key {key!r} are to hold a certificate and its key in PEM, not "
                f"encrypted, and cannot be used: {error}"
            ) from error
    return tls


def _no_password() -> str:
    """Refuse a key that is encrypted; without this OpenSSL would ask at the terminal."""
    raise ValueError("the key is encrypted")


class _Connector(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's way to connect, with pybk's TLS settings, because kazoo's own always trust the system's authorities.

    Args:
        tls: The settings; None for connections without TLS.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self._tls = tls

    def create_connection(
        self, address: tuple[str, int], hostname: str | None = None, timeout: float | None = None, **options: Any
    ) -> socket.socket:
        """Connect to a server; raises OSError if that fails."""
        if self._tls is None:
            plain: socket.socket = super().create_connection(address, hostname=hostname, timeout=timeout, **options)
            return plain
        connection = socket.create_connection(address, timeout)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._tls.wrap_socket(connection, server_hostname=hostname)
        except BaseException:
            connection.close()
            raise

    def select(self, *arguments: Any, **options: Any) -> Any:
        """Wait for sockets; bytes that TLS has decrypted already count, too."""
        decrypted = [each for each in arguments[0] if isinstance(each, ssl.SSLSocket) and each.pending()]
        if not decrypted:
            return super().select(*arguments, **options)
        ready, writable, failed = super().select(*arguments[:3], 0)
        return [*decrypted, *(each for each in ready if each not in decrypted)], writable, failed


class _ClientLog(logging.LoggerAdapter[logging.Logger]):
    """kazoo's log without secrets: kazoo logs its requests, and, below DEBUG, the passwords of sessions.

    Args:
        access: Has the secrets.

    Attributes:
        trouble: The last warning.
    """

    def __init__(self, access: ZooKeeperAccess) -> None:
        super().__init__(logging.getLogger("kazoo.client"))
        self.trouble = ""
        self._secrets = (
            [] if access.credential is None else [access.credential, *(one.id.id for one in access.acl or ())]
        )

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        """See ``logging.Logger.log``."""
        if level < logging.DEBUG or not (level >= logging.WARNING or self.isEnabledFor(level)):
            return
        text = str(msg) % args if args else str(msg)
        for secret in self._secrets:
            text = text.replace(secret, "<not shown>")
        if level >= logging.WARNING:
            self.trouble = text
        super().log(level, "%s", text, **options)


class Client(KazooClient):  # type: ignore[misc]
    """A connection to ZooKeeper, which knows why it fails.

    Args:
        hosts: ``host:port``, several separated by commas.
        lease_time_s: The lease time that servers are asked for, seconds.
        access: The access to them.
    """

    def __init__(self, hosts: str, lease_time_s: float, access: ZooKeeperAccess) -> None:
        self._log = _ClientLog(access)
        super().__init__(
            hosts=hosts,
            timeout=lease_time_s,
            handler=_Connector(access.tls),
            connection_retry=_RECONNECT,
            logger=self._log,
            auth_data=[] if access.credential is None else [("digest", access.credential)],
            default_acl=access.acl,
        )
        self.add_listener(self._forget_trouble)

    def _forget_trouble(self, state: str) -> None:
        if state == KazooState.CONNECTED:
            self._log.trouble = ""

    @property
    def trouble(self) -> str:
        """The reason why the connection fails, and the remedy; empty if none is known."""
        text = self._log.trouble
        remedy = next((remedy for part, remedy in _REMEDIES if part.lower() in text.lower()), "")
        return text and f" ({text})" + (remedy and f"; {remedy}")
