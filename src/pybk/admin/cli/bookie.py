"""The command ``pybk bookie``: serve as a bookie until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from pybk.admin.cli.arguments import add_command, directory_of, secret_needed
from pybk.admin.cli.credentials import secret_of, takes_secret
from pybk.admin.cli.output import SOUND, print_json
from pybk.admin.standalone_bookie import serve
from pybk.bookie.server import BookieServer


def add_bookie(commands: Any) -> None:
    """Add ``pybk bookie``."""
    text = "serve as a bookie until SIGTERM or SIGINT"
    bookie = add_command(commands, "bookie", _bookie, text, "the bookie's directory")
    bookie.add_argument(
        "--listen",
        action="append",
        required=True,
        metavar="ADDRESS",
        help="tcp://host:port (port * for any) or ipc://path; give it again for more addresses; the first one is "
        "registered for clients",
    )
    bookie.add_argument(
        "--advertise",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="address to register for clients instead, such as tcp://bookie1.example.org:3181; needed with "
        "tcp://0.0.0.0:...",
    )
    bookie.add_argument(
        "--metadata",
        required=True,
        metavar="URL",
        help="where the cluster's metadata is: zk://host:port,host:port/path, or lmdb:///path for one host",
    )
    bookie.add_argument("--id", metavar="NAME", help="its name; default: that of the directory, or a new one")
    bookie.add_argument(
        "--moved", action="store_true", help="the directory was moved since the last start, and no copy of it is left"
    )
    bookie.add_argument(
        "--replace", action="store_true", help="take the name of a bookie whose directory is lost for good"
    )
    bookie.add_argument("--rack", default="", metavar="RACK", help="where it stands, such as /room/rack")
    takes_secret(bookie)


def _bookie(parsed: argparse.Namespace) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")

    def ready(bookie: BookieServer) -> None:
        name, addresses = bookie.bookie.bookie_id, list(bookie.addresses)
        if parsed.json:
            print_json({"bookie": name, "addresses": addresses}, indent=None)
        else:
            print(f"bookie {name} serves at {', '.join(addresses)}")
        sys.stdout.flush()

    with secret_needed():
        serve(
            directory_of(parsed),
            parsed.listen,
            parsed.metadata,
            secret_of(parsed),
            bookie_id=parsed.id,
            advertise=parsed.advertise,
            rack=parsed.rack,
            moved=parsed.moved,
            replace=parsed.replace,
            ready=ready,
        )
    return SOUND
