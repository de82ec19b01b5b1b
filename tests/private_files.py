"""Files with secrets, which commands take only if others cannot read them."""

from __future__ import annotations

from pathlib import Path


def write_private(path: Path, data: bytes) -> Path:
    """Write a file that its owner alone may read; returns its path."""
    path.touch(mode=0o600)
    path.write_bytes(data)
    return path
