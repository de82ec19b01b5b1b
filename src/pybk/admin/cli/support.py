"""The command ``pybk support bundle``: facts about a cluster or a store for support, in one file without secrets.

The file has the JSON output of commands that change nothing, with the exit status and the errors of each; the ends of
logs; and the metrics of processes. Of a cluster that ``pybk dev up`` made, the logs and the HTTP ports are known.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from http.client import HTTPException
from typing import Any, Final
from urllib.request import urlopen

from pybk.admin.cli import parser_of
from pybk.admin.cli.command_parser import Verbs, is_url
from pybk.admin.cli.output import PARTLY, SOUND, counted, print_json, print_note
from pybk.admin.dev.dev_cluster import STATE, DevCluster
from pybk.credentials import without_credentials
from pybk.errors import PybkError
from pybk.metadata.store import without_secrets
from pybk.storage.io.filesystem import open_regular
from pybk.version import __version__

_LMDB: Final = "lmdb://"
_LOG_BYTES_MAX: Final = 1 << 20
_METRICS_BYTES_MAX: Final = 16 << 20
_ANSWER_SECONDS: Final = 5.0

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


def _bundle(parsed: argparse.Namespace) -> int:
    commands = CLUSTER_COMMANDS if is_url(parsed.path) else STORE_COMMANDS
    dev = _dev_cluster(parsed.path)
    logs, urls = list(parsed.log), list(parsed.metrics)
    if dev is not None:
        logs += [dev.path("logs", f"{name}.log") for name in dev.members]
        urls += [f"{each.http}/metrics" for each in dev.members.values()]
    failed: list[str] = []
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
        for name, read, sources in (("log", _end_of, logs), ("metrics", _answer, urls)):
            for number, source in enumerate(sources):
                content = _content_of(read, source)
                if content["error"]:
                    failed.append(f"{name} {without_credentials(source)}")
                shown = re.sub(r"[^A-Za-z0-9.]+", "-", without_credentials(source)).strip("-")
                _put(bundle, f"{name}-{number}-{shown}", content)
    if parsed.json:
        shown_urls = [without_credentials(each) for each in urls]
        print_json(
            {"file": parsed.file, "commands": list(commands), "logs": logs, "metrics": shown_urls, "failed": failed}
        )
    else:
        of = (
            f"{counted(len(commands), 'command')}, {counted(len(logs), 'log')}, {counted(len(urls), 'page')} of metrics"
        )
        print(f"{parsed.file}: {of}; {len(failed)} failed")
    return PARTLY if failed else SOUND


def _dev_cluster(path: str) -> DevCluster | None:
    """Return the local cluster of a metadata URL, if ``pybk dev up`` made it."""
    directory = os.path.dirname(path.removeprefix(_LMDB)) if path.startswith(_LMDB) else ""
    return DevCluster.found(directory) if directory and os.path.isfile(os.path.join(directory, STATE)) else None


def _content_of(read: Callable[[str], str], source: str) -> dict[str, str]:
    """Return what is read of a source, or the error."""
    try:
        return {"of": source, "text": read(source), "error": ""}
    except (OSError, ValueError) as error:
        return {"of": source, "text": "", "error": f"{type(error).__name__}: {error}"}


def _end_of(path: str) -> str:
    """Return the end of a log."""
    with open(open_regular(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES_MAX))
        return file.read(_LOG_BYTES_MAX).decode(errors="replace")


def _answer(url: str) -> str:
    """Return what an HTTP port answers; ValueError for a URL of another kind."""
    if not url.startswith(("http://", "https://")):
        raise ValueError("not an HTTP URL")
    try:
        with urlopen(url, timeout=_ANSWER_SECONDS) as answer:
            found: bytes = answer.read(_METRICS_BYTES_MAX)
    except HTTPException as error:
        raise ValueError(f"not an HTTP response: {error}") from error
    return found.decode(errors="replace")


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


VERBS: Final[Verbs] = {"bundle": _bundle}
"""The verbs of ``pybk support``."""
