"""The dog school of the library's introduction, at work until it is killed: ``python -m tests.adapters.dog_school``.

It prints a line for each trick that is durable: the dog's id, the trick, and the notification id.
"""

from __future__ import annotations

import sys
from typing import Any
from uuid import UUID

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event


class Dog(Aggregate):
    """A dog with its tricks."""

    @event("Registered")
    def __init__(self, name: str) -> None:
        self.name = name
        self.tricks: list[str] = []

    @event("TrickAdded")
    def add_trick(self, trick: str) -> None:
        """Learn a trick."""
        self.tricks.append(trick)


class DogSchool(Application[UUID]):
    """Dogs learn tricks."""

    is_snapshotting_enabled = True

    def register_dog(self, name: str) -> UUID:
        """Add a dog."""
        dog = Dog(name)
        self.save(dog)
        return dog.id

    def add_trick(self, dog_id: UUID, trick: str) -> int:
        """Teach a dog a trick; returns the notification id."""
        dog: Dog = self.repository.get(dog_id)
        dog.add_trick(trick)
        [recording] = self.save(dog)
        return recording.notification.id

    def get_dog(self, dog_id: UUID) -> dict[str, Any]:
        """Return a dog's name and tricks."""
        dog: Dog = self.repository.get(dog_id)
        return {"name": dog.name, "tricks": tuple(dog.tricks)}


if __name__ == "__main__":
    # Topics of events name their module, which is not that of a program.
    from tests.adapters.dog_school import DogSchool as School

    with School() as school:
        for number in range(1_000_000):
            dog_id = school.register_dog(f"dog {number}")
            for trick in range(number % 5):
                notification_id = school.add_trick(dog_id, f"trick {trick}")
                if trick == 3:
                    school.take_snapshot(dog_id)
                sys.stdout.write(f"{dog_id} {trick} {notification_id}\n")
                sys.stdout.flush()
