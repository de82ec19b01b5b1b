"""The options of the administration interface of a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from pybk.admin import http as interface
from pybk.admin.http.extra import check_installed
from pybk.errors import UsageError
from pybk.options.kinds import host_and_port

if TYPE_CHECKING:
    from pybk.admin.http.server import AdminServer
    from pybk.admin.http.shown import Shown
    from pybk.admin.http.tokens import Token
    from pybk.bookie.server import BookieServer
    from pybk.manager.ledger_manager import LedgerManager


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """The options of the interface that a program serves.

    Attributes:
        listen: ``HOST:PORT``.
        tokens: The file of tokens; empty for none.
        certificate: The file of the certificate; empty for none.
        key: The file of its key; empty if that is in the same file.
    """

    listen: str
    tokens: str = ""
    certificate: str = ""
    key: str = ""

    def read_tokens(self) -> tuple[Token, ...]:
        """Return the valid tokens; raises UsageError if the file cannot be read, or is not a file of tokens."""
        return interface.read_tokens(self.tokens) if self.tokens else ()

    def check_for_bookie(self) -> None:
        """Check tokens and certificate before a bookie starts, because one that cannot serve must not register.

        Raises:
            UsageError: As ``serve`` for a bookie, except for an address that cannot be listened on.
        """
        host, _ = host_and_port(self.listen)
        interface.checked_context(host, self.read_tokens(), self._files, of_bookie=True)

    @property
    def _files(self) -> tuple[str, str] | None:
        """The files of the certificate and its key; raises UsageError for a key alone."""
        if self.key and not self.certificate:
            raise UsageError(f"the key {self.key!r} has no certificate: name that as well")
        return (self.certificate, self.key or self.certificate) if self.certificate else None

    def serve(
        self,
        manager: LedgerManager,
        bookie: BookieServer | None = None,
        *,
        hosts: Sequence[str] = (),
        store: str = "",
        **shown: Unpack[Shown],
    ) -> AdminServer:
        """Serve the interface of a manager, or of one bookie; the arguments are those of ``AdminServer``.

        Raises:
            UsageError: As ``AdminServer`` and ``read_tokens``; or the extra ``pybk[http]`` is not installed.
        """
        check_installed()
        host, port = host_and_port(self.listen)
        return interface.AdminServer(
            manager,
            host,
            port,
            tokens=self.read_tokens(),
            hosts=hosts,
            certificate=self._files,
            bookie=bookie,
            store=store,
            **shown,
        )
