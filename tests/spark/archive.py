"""An archive of the classes that JVMs here load: they map it, instead of reading and linking thousands of classes.

``make test`` makes it (see ``archiving``); without it everything runs, too, with more work for each JVM.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Final

from tests.paths import ROOT

DIRECTORY: Final = ROOT / ".java"
"""Git ignores it, and ``make clean`` removes it."""


def place(jars: Path) -> Path:
    """Return the path of the archive that belongs to this Java and to a directory of jars."""
    java = Path(shutil.which("java") or "java").resolve()
    parts = " ".join(f"{path} {path.stat().st_mtime_ns}" for path in (java, jars))
    return DIRECTORY / f"classes-{hashlib.sha256(parts.encode()).hexdigest()[:16]}.jsa"


def mapping(jars: Path) -> list[str]:
    """Return what has a JVM map the archive: nothing if there is none."""
    path = place(jars)
    return [f"-XX:SharedArchiveFile={path}"] if path.exists() else []


def class_path(jars: Path) -> str:
    """Return the start of each class path: a JVM maps an archive only if both class paths start alike."""
    return f"{jars}/*"
