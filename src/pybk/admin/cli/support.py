"""The command ``pybk support bundle``: what helpers want to see of a cluster or a store, in one file without secrets.

It has what commands print that only look, as JSON, with the exit status and the errors of each.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
import tarfile
import time
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, Final

from pybk.admin.cli.arguments import STORE_OR_CLUSTER, CommandParser, add_command, is_url
from pybk.admin.cli.credentials import takes_secret
from pybk.admin.cli.output import PARTLY, SOUND, counted, print_json, print_note
from pybk.errors import PybkError
from pybk.metadata.store import without_secrets
from pybk.version import __version__

CLUSTER_COMMANDS: Final = (
    "cluster status",
    "cluster check",
    "cluster settings show",
    "cluster orphans",
    "cluster upgrade",
    "bookie list --removed",
    "repair list",
    "repair status",
    "scrub status",
    "metadata check",
)
STORE_COMMANDS: Final = ("store status", "store files", "store upgrade", "scrub status", "permissions")
"""The commands whose output is in a bundle; none of them changes anything."""


def add(parser: CommandParser) -> None:
    """Add the verbs of ``pybk support``."""
    text = "write what commands show that only look to a file, without secrets and entries; exit 5 if one failed"
    bundle = add_command(parser.add_subparsers(), "bundle", _bundle, text, STORE_OR_CLUSTER)
    bundle.add_argument("file", metavar="FILE", help="the file, a .tar.gz, which must not exist")
    takes_secret(bundle)


def _bundle(parsed: argparse.Namespace) -> int:
    commands = CLUSTER_COMMANDS if is_url(parsed.path) else STORE_COMMANDS
    failed = []
    with (
        open(os.open(parsed.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file,
        tarfile.open(fileobj=file, mode="w:gz") as bundle,
    ):
        _put(bundle, "about", _about(parsed))
        for command in commands:
            print_note(parsed, f"pybk {command}")
            found = _output_of(parsed, command)
            if found["error"]:
                failed.append(command)
            _put(bundle, command.replace(" ", "-"), found)
    if parsed.json:
        print_json({"file": parsed.file, "commands": list(commands), "failed": failed})
    else:
        print(f"{parsed.file}: {counted(len(commands), 'command')}, {len(failed)} failed")
    return PARTLY if failed else SOUND


def _about(parsed: argparse.Namespace) -> dict[str, Any]:
    return {
        "path": without_secrets(parsed.path),
        "time_ns": time.time_ns(),
        "pybk": __version__,
        "python": sys.version,
        "platform": platform.platform(),
    }


def _output_of(parsed: argparse.Namespace, command: str) -> dict[str, Any]:
    """Return what a command prints, and its exit status; None for one that failed, with its error."""
    from pybk.admin.cli import parser_of

    words = [*command.split(), parsed.path, "--json", "--quiet"]
    if is_url(parsed.path) and parsed.cluster_secret_file is not None:
        words += ["--cluster-secret-file", parsed.cluster_secret_file]
    out, err, status, error = io.StringIO(), io.StringIO(), None, ""
    with redirect_stdout(out), redirect_stderr(err):
        try:
            given = parser_of(words[:1]).parse_args(words)
            status = given.run(given)
        except (PybkError, OSError) as caught:
            error = f"{type(caught).__name__}: {caught}"
    try:
        printed = json.loads(out.getvalue())
    except ValueError:
        printed = out.getvalue()
    return {"command": command, "status": status, "printed": printed, "notes": err.getvalue(), "error": error}


def _put(bundle: tarfile.TarFile, name: str, content: dict[str, Any]) -> None:
    data = without_secrets(json.dumps(content, indent=2, sort_keys=True)).encode()
    entry = tarfile.TarInfo(f"pybk-support/{name}.json")
    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
    bundle.addfile(entry, io.BytesIO(data))
