"""The command ``pybk console``: a process that shows and administers a cluster over HTTP."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any, Final

from pybk.admin.cli.arguments import CLUSTER, CommandParser, takes_path
from pybk.admin.cli.clusters import manager_of
from pybk.admin.cli.credentials import takes_secret
from pybk.admin.cli.output import SOUND, print_json_line
from pybk.admin.http_options import HttpSettings, host_and_port
from pybk.admin.profiles import Profile
from pybk.credentials import CLUSTER_SECRET
from pybk.metadata.store import without_secrets

LISTEN: Final = "127.0.0.1:9460"


def add(parser: CommandParser) -> None:
    """Add the arguments of ``pybk console``."""
    takes_path(parser, _serve, CLUSTER)
    takes_secret(parser)
    parser.set_defaults(profile=parser.profile)
    parser.add_argument(
        "--name",
        default=parser.profile,
        metavar="NAME",
        help="what the page calls the cluster (default: the name of the profile, or the beginning of the cluster's id)",
    )
    group = parser.add_argument_group("HTTP")
    group.add_argument(
        "--http",
        type=_address,
        default=LISTEN,
        metavar="HOST:PORT",
        help=f"where it serves; beyond loopback it takes tokens and a certificate (default: {LISTEN})",
    )
    group.add_argument("--http-tokens", default="", metavar="FILE", help="the tokens that are valid; see `pybk token`")
    group.add_argument(
        "--http-certificate", default="", metavar="FILE", help="serve HTTPS with this certificate, in PEM"
    )
    group.add_argument("--http-key", default="", metavar="FILE", help="its key, if it is in another file")
    group.add_argument(
        "--http-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name by which browsers may ask for it; give it again for more",
    )
    group = parser.add_argument_group("what bookies do")
    group.add_argument(
        "--bookies", metavar="FILE", help='TOML with the HTTP port of each: b1 = "http://127.0.0.1:9464"'
    )
    group.add_argument("--bookies-token", default="", metavar="FILE", help="holds the token that they take")
    group.add_argument("--bookies-ca", default="", metavar="FILE", help="the authority of their certificates, in PEM")
    group = parser.add_argument_group("log")
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="of lines on the standard error")
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="the least level"
    )


def _address(text: str) -> str:
    try:
        host_and_port(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.50} is no address; it takes HOST:PORT, such as {LISTEN}") from None
    return text


def command_of(parsed: argparse.Namespace) -> str:
    """Return how commands reach the cluster: by the profile, or with its URL and the file of its secret."""
    if parsed.profile and Profile.read(parsed.profile).metadata == parsed.path:
        return f"pybk --profile {shlex.quote(parsed.profile)} COMMAND"
    file = parsed.cluster_secret_file or os.environ.get(f"{CLUSTER_SECRET}_FILE")
    secret = ["--cluster-secret-file", os.path.abspath(file)] if file else []
    return f"pybk COMMAND {shlex.join([without_secrets(parsed.path), *secret])}"


def _serve(parsed: argparse.Namespace) -> int:
    from pybk.admin import console, service_log

    service_log.begin(parsed.log_format, parsed.log_level)
    names: Any = {"listen": "http", "tokens": "http_tokens", "certificate": "http_certificate", "key": "http_key"}
    settings = HttpSettings(**{name: getattr(parsed, given) for name, given in names.items()})

    ports = None
    if parsed.bookies is not None:
        ports = console.bookie_ports(parsed.bookies, parsed.bookies_token, parsed.bookies_ca)

    def ready(url: str) -> None:
        if parsed.json:
            print_json_line({"http": url})
        else:
            print(f"the console serves at {url}")
        sys.stdout.flush()

    shown = {"name": parsed.name, "command": command_of(parsed)}
    with manager_of(parsed) as manager:
        console.serve(manager, settings, ready=ready, hosts=parsed.http_host, ports=ports, **shown)
    return SOUND
