"""The command ``pybk console``: a process that shows and administers a cluster over HTTP."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Any, Final

from pybk.admin import service_log, standalone_console
from pybk.admin.cli.clusters import manager_of
from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.output import SOUND, print_json_line
from pybk.admin.http.shown import OpensLogs, Shown
from pybk.admin.http_options import HttpSettings
from pybk.admin.profiles import Profile
from pybk.credentials import CLUSTER_SECRET, Secret
from pybk.metadata.store import without_secrets


def command_of(parsed: argparse.Namespace) -> str:
    """Return the form of commands that reach the cluster: with the profile, or with its URL and secret file."""
    if parsed.profile and Profile.read(parsed.profile).metadata == parsed.path:
        return f"pybk --profile {shlex.quote(parsed.profile)} COMMAND"
    file = parsed.cluster_secret_file or os.environ.get(f"{CLUSTER_SECRET}_FILE")
    secret = ["--cluster-secret-file", os.path.abspath(file)] if file else []
    return f"pybk COMMAND {shlex.join([without_secrets(parsed.path), *secret])}"


def _opens_logs(parsed: argparse.Namespace) -> OpensLogs:
    """Return what opens the logs whose records the page may show; raises UsageError if it cannot be read."""
    found: OpensLogs = {}
    if parsed.peek_password_file is not None:
        found["password"] = _readable(parsed.peek_password_file)
    if parsed.peek_secret_file is not None:
        found["secret"] = _readable(parsed.peek_secret_file)
    return found


def _readable(file: str) -> Secret:
    """Return a secret in a file, which is read whenever it is used, and once now."""
    found = Secret(file=file, private=True)
    found.read()
    return found


def _serve(parsed: argparse.Namespace) -> int:
    service_log.begin(parsed.log_format, parsed.log_level)
    names: Any = {"listen": "http", "tokens": "http_tokens", "certificate": "http_certificate", "key": "http_key"}
    settings = HttpSettings(**{name: getattr(parsed, given) for name, given in names.items()})

    ports = None
    if parsed.bookies is not None:
        ports = standalone_console.bookie_ports(parsed.bookies, parsed.bookies_token, parsed.bookies_ca)

    def ready(url: str) -> None:
        if parsed.json:
            print_json_line({"http": url})
        else:
            print(f"the console serves at {url}")
        sys.stdout.flush()

    name = parsed.profile if parsed.name is None else parsed.name
    shown = Shown(ports=ports, name=name, command=command_of(parsed), **_opens_logs(parsed))
    with manager_of(parsed) as manager:
        standalone_console.serve(manager, settings, ready=ready, hosts=parsed.http_host, **shown)
    return SOUND


VERBS: Final[Verbs] = {"": _serve}
"""``pybk console``, which has no verbs."""
