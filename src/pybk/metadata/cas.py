"""How the outcome of a change is found when the answer was lost (protocol rules C8, C9, C10).

A lost answer is never taken for a failure. Each value carries a token that its writer chose, so reading back shows
whose value it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pybk.errors import MetadataExistsError, MetadataUnreachableError, MetadataVersionError
from pybk.metadata.store import MetadataStore, Node

_TRIES: Final = 5


def settle(store: MetadataStore, key: str, change: Callable[[], int], mine: Callable[[Node | None], bool]) -> int:
    """Make a conditional change, and make sure whether it took effect.

    A change whose answer was lost, and which is not to be seen, is made again: its condition sees to it that it takes
    effect once at most.

    Args:
        store: The store.
        key: What is changed.
        change: ``create``, ``put`` or ``delete`` of the key; returns the version.
        mine: Tells whether what the key has now shows that the change took effect.

    Returns:
        The key's version after the change, or what it is now if the answer was lost; 0 for a key that is gone.

    Raises:
        MetadataExistsError: There was such a key.
        MetadataVersionError: There was another version; with ``outcome_unknown`` if an answer had been lost, and
            somebody else has changed the key since.
        MetadataUnreachableError: The store is out of reach; with ``outcome_unknown`` if an answer had been lost.
    """
    lost: MetadataUnreachableError | None = None
    for _ in range(_TRIES):
        try:
            return change()
        except MetadataUnreachableError as error:
            if not error.outcome_unknown and lost is None:
                raise
            lost = error
        except (MetadataExistsError, MetadataVersionError) as error:
            if lost is None:
                raise
            node = _look(store, key, lost)
            if mine(node):
                return 0 if node is None else node.version
            raise type(error)(f"{error}; an answer had been lost before", outcome_unknown=True) from lost
        node = _look(store, key, lost)
        if mine(node):
            return 0 if node is None else node.version
    raise MetadataUnreachableError(
        f"metadata key {key!r}: the answers to {_TRIES} changes in a row were lost, the last because: {lost}",
        outcome_unknown=True,
    ) from lost


def _look(store: MetadataStore, key: str, lost: MetadataUnreachableError) -> Node | None:
    """Read a key after an answer was lost."""
    try:
        return store.get(key, latest=True)
    except MetadataUnreachableError as error:
        raise MetadataUnreachableError(
            f"metadata key {key!r}: the answer to a change was lost ({lost}), and what became of it cannot be read: "
            f"{error}; read it again once the store can be reached",
            outcome_unknown=True,
        ) from lost
