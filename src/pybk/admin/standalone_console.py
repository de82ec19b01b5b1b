"""A process that shows and administers a cluster over HTTP until it is stopped: the interface, its page, and metrics.

SIGTERM and SIGINT end it; SIGHUP reads tokens and certificates again; SIGUSR1 writes the stacks of all threads. It is
only a client of the cluster, so it may end at any time, and several may run.
"""

from __future__ import annotations

import logging
import re
import ssl
import tomllib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Unpack

from pybk.admin.http.bookie_loads import BookiePorts
from pybk.admin.http_options import HttpSettings
from pybk.admin.sd_notify import notify, reloading
from pybk.admin.signals import STOPS, Signals
from pybk.credentials import read_secret_file
from pybk.errors import UsageError
from pybk.manager.ledger_manager import LedgerManager
from pybk.storage.io.filesystem import read_regular

if TYPE_CHECKING:
    from pybk.admin.http.shown import Shown

logger = logging.getLogger(__name__)

_PORTS_BYTES_MAX: Final = 1 << 20
_TOKEN: Final = re.compile(rb"[A-Za-z0-9._~+/-]+=*")
"""The text that may follow ``Bearer`` in a header (RFC 6750)."""

STORE: Final = "console"
"""The label ``store`` of the metrics, which are those of this client."""


_A_LINE: Final = 'it takes a line for each bookie, such as b1 = "http://127.0.0.1:9464"'


def bookie_ports(path: str, token: str = "", authority: str = "") -> BookiePorts:
    """Return the HTTP ports of bookies, from a file that may change later.

    Args:
        path: A TOML file with the URL of each port by the name of its bookie.
        token: The file with the token for these ports; empty for none.
        authority: The file of the authorities, in PEM, that signed their certificates; empty for those of the system.

    Raises:
        UsageError: A file cannot be read or used; or every user of this host may read or change that of the token.
    """

    def urls() -> dict[str, str]:
        try:
            found = tomllib.loads(read_regular(path, _PORTS_BYTES_MAX).decode())
        except OSError as error:
            raise UsageError(
                f"{path} is to name the ports of bookies in TOML, and cannot be read: {error.strerror}; name a file "
                "that this user can read"
            ) from error
        except ValueError as error:
            raise UsageError(f"{path} is to name the ports of bookies in TOML: {error}; {_A_LINE}") from error
        if not all(isinstance(url, str) for url in found.values()):
            raise UsageError(f"{path} is to name the ports of bookies in TOML; {_A_LINE}")
        return found

    urls()
    try:
        context = ssl.create_default_context(cafile=authority) if authority else None
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"the certificates {authority!r} cannot be used: {error}; name a file of certificates in PEM that this "
            "user can read"
        ) from error
    return BookiePorts(urls=urls, token=_token_in(token) if token else "", context=context)


def _token_in(path: str) -> str:
    """Return the token that a file holds; raises UsageError for anything else, which is not shown."""
    found = _TOKEN.fullmatch(read_secret_file(path, private=True))
    if found is None:
        raise UsageError(f"{path} is to hold a token alone, as `pybk token` prints one: letters, digits and -._~+/=")
    return found[0].decode()


def serve(
    manager: LedgerManager,
    settings: HttpSettings,
    *,
    ready: Callable[[str], None],
    hosts: Sequence[str] = (),
    **shown: Unpack[Shown],
) -> None:
    """Serve the interface of a cluster until SIGTERM or SIGINT. Takes over these signals, SIGHUP and SIGUSR1.

    Args:
        manager: A client of the cluster; it is not closed.
        settings: The address, the tokens and the certificate.
        ready: Called with the URL once it serves.
        hosts: The names that requests may give in ``Host``, as for ``AdminServer``.
        **shown: Further things that it shows, as for ``AdminServer``.

    Raises:
        UsageError: As ``AdminServer``.

    Threads: the main thread, because signal handlers are set.
    """
    signals = Signals()
    server = settings.serve(manager, hosts=hosts, store=STORE, **shown)
    try:
        ready(server.url)
        notify("READY=1", f"STATUS=serves at {server.url}")
        while (number := signals.wait()) not in STOPS:
            if number is not None:
                reloading()
                try:
                    server.reload(settings.read_tokens())
                except UsageError as error:
                    logger.error("tokens and certificate stay as they were: %s", error)
                notify("READY=1")
        notify("STOPPING=1")
    finally:
        server.close()
