"""All workloads by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.loss.workloads.ledgers import Creation
from tests.loss.workloads.workload import Workload

WORKLOADS: Final[Mapping[str, Workload]] = {"creation": Creation()}
