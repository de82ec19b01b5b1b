"""The arguments with which the interface is served: the things that it shows in addition to its manager."""

from __future__ import annotations

from typing import TypedDict

from pybk.admin.http.bookie_loads import BookiePorts
from pybk.credentials import Secret


class OpensLogs(TypedDict, total=False):
    """The secret of the logs whose records may be looked at with a token of the scope ``operate``.

    Without a password and a secret, no record is shown.

    Attributes:
        password: Their password.
        secret: Their secret, instead of the password.
    """

    password: bytes | Secret
    secret: bytes | Secret


class Shown(OpensLogs, total=False):
    """The arguments with which the interface is served; each may be left out.

    Attributes:
        ports: The HTTP ports of the cluster's bookies, whose load is shown; None, or left out, shows the load of this
            process only.
        name: The name of the cluster or the store for people; empty, or left out, for the beginning of its id.
        command: The form of commands that reach it, ``pybk COMMAND`` with the options that they need, which the page
            offers for copying; empty, or left out, for its location only.
    """

    ports: BookiePorts | None
    name: str
    command: str


def opens_logs(shown: Shown) -> OpensLogs:
    """Return the password or secret of logs among the arguments; empty without one."""
    found = OpensLogs()
    if "password" in shown:
        found["password"] = shown["password"]
    if "secret" in shown:
        found["secret"] = shown["secret"]
    return found
