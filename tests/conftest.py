"""What holds for all tests: limits that one test lowers are those of production again in the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pybk import digest
from pybk.storage import ahead, catalog

_LIMITS = [
    (module, name, getattr(module, name))
    for module, name in ((ahead, "FIRST_FILE_BYTES"), (catalog, "_REWRITE_BYTES_MIN"), (digest, "SCRYPT_COST"))
]


@pytest.fixture(autouse=True)
def _limits_of_production() -> Iterator[None]:
    for module, name, value in _LIMITS:
        setattr(module, name, value)
    yield
    for module, name, value in _LIMITS:
        setattr(module, name, value)
