"""An event-sourced application that is killed, competes for its store, shares it, and lives in a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

import pytest
from eventsourcing.persistence import IntegrityError, OperationalError

from pybk.credentials import write_new_secret
from pybk.errors import LogLockedError, StoreLockedError, UnauthorizedError, UsageError
from tests.adapters.dog_school import Dog, DogSchool
from tests.cluster.inside import SECRET, inside
from tests.paths import ROOT

ROUNDS = 4
LINES = 40


def settings(store: Path | str, **others: str) -> dict[str, str]:
    return {
        "PERSISTENCE_MODULE": "pybk.adapters.eventsourcing",
        "PYBK_STORE": str(store),
        "PYBK_PASSWORD": "of the school",
        **others,
    }


def child(store: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.adapters.dog_school"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **settings(store)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_a_school_that_is_killed_remembers_every_trick(tmp_path: Path) -> None:
    learned: dict[UUID, int] = {}
    last = 0
    for _ in range(ROUNDS):
        with child(tmp_path / "store") as school:
            assert school.stdout is not None
            lines = [school.stdout.readline() for _ in range(LINES)]
            with pytest.raises(StoreLockedError):
                DogSchool(settings(tmp_path / "store"))
            school.kill()
            lines += [line for line in school.stdout if line.endswith("\n")]  # the last one may be cut off
        for line in lines:
            dog_id, trick, notification_id = line.split()
            learned[UUID(dog_id)] = int(trick) + 1
            assert int(notification_id) > last, "a notification id was given twice"
            last = int(notification_id)
        with DogSchool(settings(tmp_path / "store")) as again:
            for known, tricks in learned.items():
                assert len(again.get_dog(known)["tricks"]) >= tricks
            notifications = again.recorder.select_notifications(None, 100_000)
            assert [each.id for each in notifications] == list(range(1, len(notifications) + 1))
            assert len(notifications) >= last


def test_two_who_change_a_dog_at_once_conflict(tmp_path: Path) -> None:
    with DogSchool(settings(tmp_path)) as school:
        dog_id = school.register_dog("Fido")
        one: Dog = school.repository.get(dog_id)
        other: Dog = school.repository.get(dog_id)
        one.add_trick("roll over")
        other.add_trick("play dead")
        school.save(one)
        with pytest.raises(IntegrityError, match="version 2"):
            school.save(other)
        assert school.get_dog(dog_id) == {"name": "Fido", "tricks": ("roll over",)}


def test_applications_of_a_process_share_a_store(tmp_path: Path) -> None:
    class OtherSchool(DogSchool):
        name = "Other"

    with DogSchool(settings(tmp_path)) as first, DogSchool(settings(tmp_path / ".." / tmp_path.name)) as second:
        dog_id = first.register_dog("Fido")
        assert second.add_trick(dog_id, "roll over") == 2
        with OtherSchool(settings(tmp_path)) as other:
            assert other.notification_log.select(start=1, limit=10) == []
            first.close()
            assert second.add_trick(dog_id, "play dead") == 3
        with pytest.raises(UsageError, match="another password"):
            DogSchool(settings(tmp_path, PYBK_PASSWORD="another"))
    with pytest.raises(OperationalError, match="closed"):
        second.add_trick(dog_id, "swim")
    with pytest.raises(UnauthorizedError):
        DogSchool(settings(tmp_path, PYBK_PASSWORD="another"))
    with DogSchool(settings(tmp_path)) as again:
        assert again.get_dog(dog_id)["tricks"] == ("roll over", "play dead")


def test_settings_of_one_application_begin_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from a file\n", encoding="ascii")
    own = {
        "DOGSCHOOL_PYBK_PASSWORD_FILE": str(tmp_path / "password"),
        "DOGSCHOOL_PYBK_STORE": str(tmp_path / "own"),
        "PYBK_LOG": "dogs",
    }
    with DogSchool(settings(tmp_path / "common", **own)) as school:
        dog_id = school.register_dog("Fido")
    assert not (tmp_path / "common").exists()
    with DogSchool(settings(tmp_path / "own", PYBK_PASSWORD="from a file", PYBK_LOG="dogs")) as again:
        assert again.get_dog(dog_id)["name"] == "Fido"


def test_an_application_with_a_secret_is_opened_with_it_alone(tmp_path: Path) -> None:
    write_new_secret(str(tmp_path / "secret"))
    given = settings(tmp_path / "store", PYBK_SECRET_FILE=str(tmp_path / "secret"))
    del given["PYBK_PASSWORD"]
    with DogSchool(given) as school:
        dog_id = school.register_dog("Fido")
    with DogSchool(given) as again:
        assert again.get_dog(dog_id)["name"] == "Fido"
    with pytest.raises(UnauthorizedError, match="has a secret"):
        DogSchool(settings(tmp_path / "store"))


@pytest.mark.parametrize("missing", ["PYBK_STORE", "PYBK_PASSWORD"])
def test_a_setting_that_is_missing_is_named(tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(missing, raising=False)
    found = settings(tmp_path / "store")
    del found[missing]
    with pytest.raises(UsageError, match=missing):
        DogSchool(found)
    assert not (tmp_path / "store").exists()


@pytest.mark.long
def test_a_school_in_a_cluster_moves_to_another_host(tmp_path: Path) -> None:
    with inside(tmp_path) as cluster, ExitStack() as schools:
        found = settings(cluster.url, PYBK_CLUSTER_SECRET=SECRET.decode())
        school = schools.enter_context(DogSchool(found))
        dog_id = school.register_dog("Fido")
        command = [sys.executable, "-c", "from tests.adapters.dog_school import DogSchool; DogSchool()"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **found}
        rival = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert LogLockedError.__name__ in rival.stderr
        assert school.add_trick(dog_id, "roll over") == 2
        schools.close()
        program = f"from tests.adapters.dog_school import *\nwith DogSchool() as s: print(s.get_dog(UUID('{dog_id}')))"
        there = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert (there.stderr, there.stdout) == ("", "{'name': 'Fido', 'tricks': ('roll over',)}\n")
