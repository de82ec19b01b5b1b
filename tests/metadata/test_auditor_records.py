"""The records of the auditor: what it leaves to the next one, and the report that ends with its session."""

from __future__ import annotations

from tests.metadata.harness import World
from tests.metadata.records import cluster_on


def test_a_report_is_replaced_and_ends_with_its_session(world: World) -> None:
    store = world.open()
    one, two = cluster_on(store), cluster_on(world.open())
    assert two.read_auditor_report() is None
    for number in range(3):
        one.write_auditor_report({"number": number})
        assert two.read_auditor_report() == {"number": number}
    world.end_session(store)
    world.wait_for(lambda: two.read_auditor_report() is None)
    two.write_auditor_report({"number": 7})
    assert two.read_auditor_report() == {"number": 7}


def test_what_is_left_to_the_next_auditor_outlives_a_session(world: World) -> None:
    store = world.open()
    one, two = cluster_on(store), cluster_on(world.open())
    for number in range(2):
        one.write_auditor_state({"number": number})
    world.end_session(store)
    assert two.read_auditor_state() == {"number": 1}
    two.write_auditor_state({"number": 2})
    assert two.read_auditor_state() == {"number": 2}
