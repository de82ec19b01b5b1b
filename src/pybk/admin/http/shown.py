"""The arguments with which the interface is served: what it shows besides its manager."""

from __future__ import annotations

from typing import TypedDict

from pybk.admin.http.bookie_loads import BookiePorts
from pybk.credentials import Secret


class OpensLogs(TypedDict, total=False):
    """The secret of the logs whose records may be looked at with a token of the scope ``operate``.

    Without both no record is shown.

    Attributes:
        password: Their password.
        secret: Their secret, instead of the password.
    """

    password: bytes | Secret
    secret: bytes | Secret


class Shown(OpensLogs, total=False):
    """The arguments with which the interface is served; each may be left out.

    Attributes:
        ports: Where the HTTP ports of the cluster's bookies are, to show what they do; None, or left out, shows what
            this process does alone.
        name: What people call the cluster or the store; empty, or left out, for the beginning of its id.
        command: How commands reach it, which the page shows to be copied: ``pybk COMMAND`` with what they need besides;
            empty, or left out, for its location alone.
    """

    ports: BookiePorts | None
    name: str
    command: str


def opens_logs(shown: Shown) -> OpensLogs:
    """Return what opens logs, of all that is shown; empty for nothing."""
    found = OpensLogs()
    if "password" in shown:
        found["password"] = shown["password"]
    if "secret" in shown:
        found["secret"] = shown["secret"]
    return found
