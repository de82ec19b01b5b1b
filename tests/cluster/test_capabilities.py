"""What not every backend offers: it is not there, and the manager's error names the call or backend that offers it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pybk.backend import AtomicGroups, ReplicatedLedgers
from pybk.client.backend import ClusterBackend
from pybk.errors import IllegalOperationError
from pybk.manager.ledger_manager import LedgerManager
from pybk.manager.local_backend import StoreBackend, StoreUpkeep
from tests.cluster.inside import inside
from tests.internals import backend_of
from tests.storage.real_store import open_quick

CAPABILITIES: tuple[type, ...] = (AtomicGroups, ReplicatedLedgers, StoreUpkeep)
OFFERED: dict[type, set[type]] = {StoreBackend: {AtomicGroups, StoreUpkeep}, ClusterBackend: {ReplicatedLedgers}}


@pytest.mark.parametrize("kind", OFFERED)
def test_a_backend_has_nothing_of_a_capability_that_it_does_not_offer(kind: type) -> None:
    for capability in CAPABILITIES:
        methods = [name for name in vars(capability) if not name.startswith("_")]
        assert methods, "a capability has methods"
        assert {hasattr(kind, name) for name in methods} == {capability in OFFERED[kind]}, capability.__name__
        assert issubclass(kind, capability) is (capability in OFFERED[kind])


@pytest.mark.parametrize("call", [lambda manager: manager.replicate(0), lambda manager: manager.bookies()])
def test_the_errors_of_a_store_name_the_call_for_a_cluster(
    tmp_path: Path, call: Callable[[LedgerManager], object]
) -> None:
    with open_quick(tmp_path) as manager:
        assert not manager.is_cluster
        with pytest.raises(IllegalOperationError, match=r"has no bookies; LedgerManager\.connect"):
            call(manager)


def test_the_errors_of_a_cluster_name_the_calls_of_its_administration(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster:
        manager = cluster.connect()
        assert manager.is_cluster
        assert not isinstance(backend_of(manager), AtomicGroups)
        calls: dict[str, Callable[[], Any]] = {"scrub": manager.scrub, "scrub_status": manager.scrub_status}
        for name, call in calls.items():
            with pytest.raises(IllegalOperationError, match=rf"bookies check their own.*ClusterAdmin\.{name}$"):
                call()
        manager.checkpoint()  # bookies do it by themselves
