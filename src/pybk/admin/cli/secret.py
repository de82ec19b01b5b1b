"""The command ``pybk secret``: makes secrets, and replaces that of a cluster while it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pybk.admin.cli.clusters import admin_of
from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.output import SOUND, print_json, print_result, print_table
from pybk.credentials import write_new_secret

if TYPE_CHECKING:
    from pybk.metadata.resealing import SecretStatus
    from pybk.operations.cluster_admin import ClusterAdmin


def _new(parsed: argparse.Namespace) -> int:
    write_new_secret(parsed.file)
    return print_result(
        parsed,
        {"written": parsed.file},
        f"{parsed.file} holds a new secret, for its owner alone; keep a copy elsewhere",
    )


def _shown(step: Callable[[ClusterAdmin], object]) -> Callable[[argparse.Namespace], int]:
    """Return a command that makes a step, and shows how far the replacement is then."""

    def run(parsed: argparse.Namespace) -> int:
        with admin_of(parsed) as admin:
            step(admin)
            status = admin.secret_status()
        if parsed.json:
            names = status.__dataclass_fields__
            found = {name: getattr(status, name) for name in names}
            print_json({**found, "hindrances": status.hindrances, "next": _next(status)})
            return SOUND
        rows = [
            ("secret in use", str(status.current)),
            ("valid", ", ".join(map(str, status.valid))),
            ("retired", ", ".join(map(str, status.retired)) or "none"),
            ("bookies without the newest", ", ".join(status.lacking) or "none"),
            ("values of another secret", str(status.old_values)),
            ("sessions of another secret", str(sum(max(0, each) for each in status.old_sessions.values()))),
        ]
        print_table(rows, ())
        for hindrance in status.hindrances:
            print(f"  before retiring: {hindrance}")
        print(f"  next: {_next(status)}")
        return SOUND

    return run


def _next(status: SecretStatus) -> str:
    """Return what is to be done next."""
    if len(status.valid) == 1:
        return (
            "to replace the secret, make FILE.next with another one for every member, and `pybk secret add`"
            if not status.current
            else "`mv FILE.next FILE` at every member, if that is not done, and make a new export of the metadata"
        )
    if status.current != max(status.valid):
        return (
            "give FILE.next to all bookies and to all clients, then `pybk secret switch`. Clients that are not bookies "
            "are not known here; one without it cannot read values that are written after the switch"
        )
    if status.old_values:
        return "`pybk secret reseal`"
    if any(count > 0 for count in status.old_sessions.values()):
        return (
            "give FILE.next to the clients that have the sessions of the old secret, repeat `pybk secret switch`, "
            "which makes them look for it, and then `pybk secret retire`"
        )
    if status.hindrances:
        return "`pybk secret status` again in some seconds, and once nothing is left before it, `pybk secret retire`"
    return "`pybk secret retire`"


VERBS: Final[Verbs] = {
    "new": _new,
    "status": _shown(lambda admin: None),
    "add": _shown(lambda admin: admin.add_secret()),
    "switch": _shown(lambda admin: admin.switch_secret()),
    "reseal": _shown(lambda admin: admin.reseal_metadata()),
    "retire": _shown(lambda admin: admin.retire_secret()),
}
"""The verbs of ``pybk secret``."""
