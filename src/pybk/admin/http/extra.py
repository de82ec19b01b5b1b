"""The check whether the packages that serve HTTP are installed, those of the extra ``pybk[http]``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from pybk.errors import UsageError

_PACKAGES: Final = ("msgspec", "starlette", "uvicorn")


def missing() -> str:
    """Return a sentence with the missing packages and the command that installs them; empty if none is missing."""
    found = [each for each in _PACKAGES if find_spec(each) is None]
    return f"HTTP takes {' and '.join(found)}: pip install 'pybk[http]'" if found else ""


def check_installed() -> None:
    """Raise UsageError, with the command that installs them, if packages are missing."""
    if said := missing():
        raise UsageError(said)
