"""The interface as an ASGI application, to mount in another one, such as FastAPI's."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Unpack

from starlette.types import ASGIApp

from pybk.admin.http.application import AdminApplication
from pybk.admin.http.shown import Shown
from pybk.admin.http.tokens import Token
from pybk.manager.ledger_manager import LedgerManager


def asgi_app(
    manager: LedgerManager,
    *,
    tokens: Iterable[Token] = (),
    hosts: Collection[str] = (),
    open_reads: bool = True,
    **shown: Unpack[Shown],
) -> ASGIApp:
    """Return an ASGI application with the administration interface and its page.

    Requests are answered in threads of its own. So the event loop keeps running, and a request that waits for the
    metadata store holds no thread of others. The server that runs the application limits connections, and has the
    certificates.

    Args:
        manager: The manager of a store or of a cluster; it stays open when the application ends.
        tokens: The valid tokens; without one nothing can be changed.
        hosts: The names that requests may give in ``Host``, in addition to those of loopback; ``"*"`` allows all.
        open_reads: Whether everybody whom the server admits may read.
        **shown: Further things that it shows: ``ports``, ``name``, ``command``, ``password`` and ``secret``, as for
            ``AdminServer``.
    """
    return AdminApplication(manager, tokens=tokens, hosts=hosts, open_reads=open_reads, **shown)
