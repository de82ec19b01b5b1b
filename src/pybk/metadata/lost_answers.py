r"""Compare-and-set whose outcome is known: finds the outcome of a change whose answer was lost (rules C8, C9, C10).

Theory of operation. Every change of a metadata store is conditional: ``create`` on the key's absence, ``put`` and
``delete`` on its version. So a change can be repeated, and takes effect at most once. Every value carries a token that
its writer chose at random, so reading the key shows which writer's value it holds. To *settle* a change means:

    change --answered-------------------------------> the answer, a version or an error
      |  \--answer lost--> read the latest value --ours--> took effect: the version that the key has now
      |                        |
      +<-------not ours--------+                    repeat the change, up to ``_TRIES`` times

An error of a repeated change that says that the key exists, or has another version, has two explanations: the first
attempt took effect, or another process was faster. The value decides. If the value is not ours, ours may have been
written and replaced since. Nothing can show that, so the error has ``outcome_unknown``. A lost answer never counts as a
failure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pybk.errors import MetadataExistsError, MetadataUnreachableError, MetadataVersionError
from pybk.metadata.store import MetadataStore, Node

_TRIES: Final = 5


def settle(store: MetadataStore, key: str, change: Callable[[], int], mine: Callable[[Node | None], bool]) -> int:
    """Make a conditional change, and find out whether it took effect; see this module.

    Args:
        store: The store.
        key: The key that is changed.
        change: Calls ``create``, ``put`` or ``delete`` of the key; returns the version.
        mine: Returns whether the key's current value shows that the change took effect.

    Returns:
        The key's version after the change, or its current version if the answer was lost; 0 if it has no value.

    Raises:
        MetadataExistsError: The key existed.
        MetadataVersionError: The key had another version. With ``outcome_unknown`` if an answer was lost and another
            process has changed the key since.
        MetadataUnreachableError: The store cannot be reached. With ``outcome_unknown`` if an answer was lost.
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
            raise type(error)(f"{error}; the answer to an earlier attempt was lost", outcome_unknown=True) from lost
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
            f"metadata key {key!r}: the answer to a change was lost ({lost}), and its outcome cannot be read: "
            f"{error}; read the key again once the store can be reached",
            outcome_unknown=True,
        ) from lost
