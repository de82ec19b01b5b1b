"""The public test cases of the library ``eventsourcing``, all that its interfaces of recorders and factories have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    InfrastructureFactory,
    ProcessRecorder,
    Tracking,
    TrackingRecorder,
)
from eventsourcing.tests import application as application_cases
from eventsourcing.tests import persistence as cases
from eventsourcing.tests import projection as projection_cases
from eventsourcing.utils import Environment, get_topic

from pybk import UsageError
from pybk.adapters.eventsourcing import (
    PybkAggregateRecorder,
    PybkApplicationRecorder,
    PybkFactory,
    PybkProcessRecorder,
    PybkTrackingRecorder,
)
from tests.cluster.inside import inside
from tests.forking import all_locks_held, in_child


class InStore:
    """Gives each test a store of its own, which the environment names."""

    env: Any

    @pytest.fixture(autouse=True)
    def _store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PERSISTENCE_MODULE", "pybk.adapters.eventsourcing")
        monkeypatch.setenv("PYBK_STORE", str(tmp_path / "store"))
        monkeypatch.setenv("PYBK_INSECURE", "y")
        self.env = Environment("Cases", dict(os.environ))

    def factory_of_store(self) -> InfrastructureFactory:
        return InfrastructureFactory.construct(self.env)


class TestAggregateRecorder(InStore, cases.AggregateRecorderTestCase):
    def create_recorder(self) -> AggregateRecorder:
        factory = self.factory_of_store()
        self.addCleanup(factory.close)
        return factory.aggregate_recorder()


class TestApplicationRecorder(InStore, cases.ApplicationRecorderTestCase[ApplicationRecorder]):
    def create_recorder(self) -> ApplicationRecorder:
        factory = self.factory_of_store()
        self.addCleanup(factory.close)
        return factory.application_recorder()

    def test_insert_subscribe(self) -> None:
        self.optional_test_insert_subscribe()


class TestTextOriginators(TestApplicationRecorder):
    """The same with originator ids that are text."""

    def new_originator_id(self) -> str:
        return f"person-{super().new_originator_id()}"


class TestNotificationIds(InStore, cases.NonInterleavingNotificationIDsBaseCase):
    def create_recorder(self) -> ApplicationRecorder:
        factory = self.factory_of_store()
        self.addCleanup(factory.close)
        return factory.application_recorder()


class TestTrackingRecorder(InStore, cases.TrackingRecorderTestCase):
    def create_recorder(self) -> TrackingRecorder:
        factory = self.factory_of_store()
        self.addCleanup(factory.close)
        return factory.tracking_recorder()


class TestTrackingOfProcessRecorder(InStore, cases.TrackingRecorderTestCase):
    def create_recorder(self) -> TrackingRecorder:
        factory = self.factory_of_store()
        self.addCleanup(factory.close)
        return factory.process_recorder()


class TestProcessRecorder(InStore, cases.ProcessRecorderTestCase):
    def create_recorder(self) -> ProcessRecorder:
        factory = self.factory_of_store()
        self.addCleanup(factory.close)
        return factory.process_recorder()


class TrackingSubclass(PybkTrackingRecorder):
    pass


class TestFactory(InStore, cases.InfrastructureFactoryTestCase[PybkFactory]):
    def expected_factory_class(self) -> type[PybkFactory]:
        return PybkFactory

    def expected_aggregate_recorder_class(self) -> type[AggregateRecorder]:
        return PybkAggregateRecorder

    def expected_application_recorder_class(self) -> type[ApplicationRecorder]:
        return PybkApplicationRecorder

    def expected_tracking_recorder_class(self) -> type[TrackingRecorder]:
        return PybkTrackingRecorder

    def tracking_recorder_subclass(self) -> type[TrackingRecorder]:
        return TrackingSubclass

    def expected_process_recorder_class(self) -> type[ProcessRecorder]:
        return PybkProcessRecorder


def test_a_setting_that_is_neither_yes_nor_no_is_refused(tmp_path: Path) -> None:
    settings = {"PYBK_STORE": str(tmp_path / "store"), "PYBK_INSECURE": "maybe"}
    with pytest.raises(UsageError, match="PYBK_INSECURE is 'maybe'; it takes y, yes, t, true, on or 1"):
        PybkFactory(Environment("Cases", settings))
    assert list(tmp_path.iterdir()) == []


class TestExampleApplication(InStore, application_cases.ExampleApplicationTestCase):
    expected_factory_topic = get_topic(PybkFactory)


@pytest.mark.filterwarnings("default:'log' is deprecated:DeprecationWarning")
class TestApplication(InStore, application_cases.ApplicationTestCase):
    pass


class CountersView(PybkTrackingRecorder, projection_cases.EventCountersView):
    """Counters in memory, that are as durable as their positions in the tests."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counters = [0, 0]

    def get_created_event_counter(self) -> int:
        return self.counters[0]

    def get_subsequent_event_counter(self) -> int:
        return self.counters[1]

    def incr_created_event_counter(self, tracking: Tracking) -> None:
        self.insert_tracking(tracking)
        self.counters[0] += 1

    def incr_subsequent_event_counter(self, tracking: Tracking) -> None:
        self.insert_tracking(tracking)
        self.counters[1] += 1


class TestView(InStore, projection_cases.EventCountersViewTestCase):
    def construct_event_counters_view(self) -> projection_cases.EventCountersView:
        factory = self.factory_of_store()
        self.addCleanup(factory.close)
        found = factory.tracking_recorder(CountersView)
        assert isinstance(found, CountersView)
        return found


class TestProjection(InStore, projection_cases.AggregateEventCountersProjectionTestCase):
    view_class: type[projection_cases.EventCountersView] = CountersView


class TestEventSourcedProjection(InStore, projection_cases.EventSourcedProjectionTestCase):
    pass


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_closes_a_factory_whatever_threads_of_its_parent_were_doing(tmp_path: Path) -> None:
    def factory_in(name: str) -> PybkFactory:
        return PybkFactory(Environment("Cases", {"PYBK_STORE": str(tmp_path / name), "PYBK_INSECURE": "y"}))

    def work() -> None:
        factory.close()
        factory_in("own").close()

    factory = factory_in("store")
    factory.application_recorder()
    with all_locks_held():
        in_child(work)
    factory.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_stores_of_its_own(tmp_path: Path) -> None:
    with inside(tmp_path, secret=None) as cluster:
        settings = {"PYBK_STORE": cluster.url, "PYBK_INSECURE": "y"}
        factory = PybkFactory(Environment("Cases", settings))
        factory.application_recorder()

        def work() -> None:
            environment = Environment("Own", settings)
            own = PybkFactory(environment)
            own.aggregate_recorder()
            factory.close()
            again = PybkFactory(environment)
            again.aggregate_recorder()  # of the same store, which has the log of that name open
            again.close()
            own.close()

        in_child(work)
        factory.close()
