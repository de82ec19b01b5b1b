"""The registration of a bookie: addresses that clients can connect to, and its state after each notable change."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from pybk.errors import UsageError
from pybk.replication.messages import Reply, Status
from pybk.transport.client_links import Links
from pybk.transport.codec import Ping
from pybk.transport.curve import check_address

if TYPE_CHECKING:
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.metadata.registration import BookieRegistration
    from pybk.transport.cluster_keys import HeldKeys

REACH_SECONDS: Final = 15.0
"""The time for which a bookie tries to reach itself at the address that it registers."""

FREE_CHANGE: Final = 0.05
"""Relative change of a tier's free bytes, or of all its bytes, above which the bookie registers at once."""

LOAD_CHANGE: Final = 1.25
"""Factor of change of ``1 + load``, the weight for placement, above which the bookie registers at once."""

_PING_NS: Final = 2 * 10**9
_AGAIN_SECONDS: Final = 0.1


def is_notable(known: BookieRegistration, now: BookieRegistration) -> bool:
    """Return whether a bookie's state changed enough for clients to treat it, or to place ledgers, differently.

    Args:
        known: The registered state.
        now: The current state.
    """
    if replace(known, tiers=now.tiers, capacity=now.capacity, load=now.load, in_limbo=now.in_limbo) != now:
        return True
    if bool(known.in_limbo) != bool(now.in_limbo):
        return True
    if known.tiers.keys() != now.tiers.keys() or known.capacity.keys() != now.capacity.keys():
        return True
    low, high = sorted((1.0 + known.load, 1.0 + now.load))
    if high > low * LOAD_CHANGE:
        return True
    before = (*known.tiers.items(), *known.capacity.items())
    after = (*map(now.tiers.__getitem__, known.tiers), *map(now.capacity.__getitem__, known.capacity))
    return any(abs(new - old) > FREE_CHANGE * old for (_, old), new in zip(before, after, strict=True))


def advertised(listen: Sequence[str], bound: Sequence[str], advertise: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses that a bookie registers.

    Args:
        listen: The addresses that the bookie was asked to listen on.
        bound: The same addresses with the ports that the operating system assigned.
        advertise: The addresses to register; empty registers ``bound``. A port ``*`` takes the port of the bound
            address with the same index, or of the last one.

    Raises:
        UsageError: One of them is an address that other hosts cannot connect to, such as a wildcard.
    """
    for address in advertise:
        check_advertised(address)
    found = []
    for place, address in enumerate(advertise or bound):
        if address.endswith(":*"):
            address = f"{address[:-1]}{urlsplit(bound[min(place, len(bound) - 1)]).port or 0}"
        if not advertise:
            _check_bound(listen[place], address)
        found.append(address)
    return tuple(found)


def check_advertised(address: str) -> None:
    """Check that an address may be registered, as far as any host can check that.

    Raises:
        UsageError: It is not an address, or stands for every address of a host.
    """
    check_address(address, secret=True)
    _check_not_wildcard(address, address)


def _check_bound(asked: str, address: str) -> None:
    """Raise UsageError if a bound address, which was asked for as ``asked``, is none that other hosts can use."""
    _check_not_wildcard(asked, address)
    host = urlsplit(address).hostname or ""
    if _is_name_of_loopback(asked, host):
        raise UsageError(
            f"{asked} is {host} here, which no other host can connect to: listen on the address of a network "
            "interface, or give the address that others use: advertise=... or `pybk bookie --advertise`"
        )


def _check_not_wildcard(asked: str, address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme == "tcp" and _is_wildcard(parts.hostname or ""):
        port = parts.netloc.rpartition(":")[2]
        raise UsageError(
            f"{asked} stands for every address of this host, so others cannot connect to it: give the address "
            f"that they use, such as advertise='tcp://HOST:{port}' or `pybk bookie --advertise`"
        )


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")


def _is_name_of_loopback(asked: str, host: str) -> bool:
    """Return whether a host name resolved to the loopback address; ``localhost`` is meant to, so it does not count."""
    name = urlsplit(asked).hostname or ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        try:
            return name != "localhost" and ipaddress.ip_address(host).is_loopback
        except ValueError:
            return False
    return False


def check_reachable(bookie: Bookie, address: str, keys: HeldKeys | None, public_key: bytes | None) -> None:
    """Check that a serving bookie can be reached at the address that it will register.

    Raises:
        UsageError: Nothing answers there within ``REACH_SECONDS``, or another bookie answers.

    Cost: One connection.
    """
    if address.startswith("inproc:"):
        return
    why, number = "nothing answered", 0
    until = time.monotonic() + REACH_SECONDS
    with Links(keys) as links:
        link = links.connect(bookie, address, public_key)
        while time.monotonic() < until:
            if not link.outstanding:
                number += 1
                link.send(number, Ping(), _PING_NS)
            for _, _, reply in links.poll(200):
                if isinstance(reply, Reply) and reply.status is Status.OK:
                    return
                why = link.why_down or why
                if reply is None:
                    time.sleep(_AGAIN_SECONDS)  # poll returns at once as long as nobody listens
                if isinstance(reply, Reply) and reply.status is Status.WRONG_INSTANCE:
                    why, until = "another bookie answers there", 0.0
    raise UsageError(
        f"{bookie} cannot be reached at {address}, which it would advertise: {why}; set the address that leads here: "
        "advertise=... or `pybk bookie --advertise`; if others can connect to it and this host cannot, skip this: "
        "`pybk bookie --no-advertise-check`"
    )
