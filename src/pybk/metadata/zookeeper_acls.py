"""Finds the znodes of a ZooKeeper store that others than the members of the cluster may use, and changes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kazoo.exceptions import NoAuthError, NoNodeError
from kazoo.security import ACL

from pybk.metadata.zookeeper_access import ZooKeeperAccess

_PIPELINE: Final = 500
"""Requests that are sent before the first wait for an answer."""


class ForeignZnode(NamedTuple):
    """A znode whose access control list is not that of the store's access.

    Attributes:
        path: Its path.
        access: The identities, each with its permissions.
        problem: The reason why it was not changed; None if it was changed, or no change was asked for.
    """

    path: str
    access: str
    problem: str | None


def foreign_znodes(
    client: Any, root: str, access: ZooKeeperAccess, *, change: bool, timeout_s: float
) -> Iterator[ForeignZnode]:
    """Yield the znodes from a root on that belong to others, parents first.

    Args:
        client: The connection.
        root: The path of the root.
        access: The access whose identity must own the znodes.
        change: Whether to give them the access control list that new znodes get.
        timeout_s: Deadline of each request, seconds.
    """
    level = [root]
    while level:
        below: list[str] = []
        for at in range(0, len(level), _PIPELINE):
            paths = level[at : at + _PIPELINE]
            asked = [client.get_acls_async(path) for path in paths]
            for path, result in zip(paths, asked, strict=True):
                try:
                    found = result.get(timeout=timeout_s)[0]
                except NoNodeError:
                    continue
                except NoAuthError:
                    yield ForeignZnode(path, "others alone", "access was refused")
                    continue
                if not access.matches(found):
                    yield ForeignZnode(path, _text(found), _change(client, path, access, timeout_s) if change else None)
            asked = [client.get_children_async(path) for path in paths]
            for path, result in zip(paths, asked, strict=True):
                try:
                    below += [f"{path}/{name}" for name in sorted(result.get(timeout=timeout_s))]
                except (NoNodeError, NoAuthError):
                    continue  # refused above already
        level = below


def _change(client: Any, path: str, access: ZooKeeperAccess, timeout_s: float) -> str | None:
    """Change an access control list; return the reason if that was not possible."""
    try:
        client.set_acls_async(path, access.acl).get(timeout=timeout_s)
    except NoNodeError:
        return None
    except NoAuthError:
        return "access was refused"
    return None


def _text(found: list[ACL]) -> str:
    """Return the identities and their permissions, without the digests of passwords."""
    return ", ".join(
        f"{each.id.scheme}:{each.id.id.partition(':')[0] if each.id.scheme == 'digest' else each.id.id} "
        f"{'+'.join(each.acl_list)}"
        for each in found
    )
