"""Python imports this at every start if this directory is on ``PYTHONPATH``: children of a test are mutated as well."""

from __future__ import annotations

from tests.mutation.loading import install

install()
