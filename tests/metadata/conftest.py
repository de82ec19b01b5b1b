"""Fixtures of the metadata tests."""

from __future__ import annotations

from tests.metadata.harness import world
from tests.zookeeper_server import zookeeper_server

__all__ = ["world", "zookeeper_server"]
