"""The command ``pybk bookie``: serve as a bookie until SIGTERM or SIGINT; or list, drain, stop and remove bookies.

The word after ``bookie`` is a verb or the directory of the bookie that serves; ``./list`` is a directory.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pybk import operations
from pybk.admin import service_log
from pybk.admin.bookie_options import BookieSettings, settings_of
from pybk.admin.cli.clusters import admin_of, mark_as_json
from pybk.admin.cli.command_parser import Verbs, check_path, directory_of, secret_needed
from pybk.admin.cli.output import (
    DAMAGED,
    REFUSED,
    SOUND,
    confirm,
    counted,
    print_json,
    print_json_line,
    print_note,
    print_result,
    print_table,
    progress_bar,
    shown_bytes,
    shown_time,
    watch,
)
from pybk.admin.cli.probing import probe
from pybk.admin.cli.service import settings_given
from pybk.admin.standalone_bookie import serve
from pybk.errors import SafetyCheckError
from pybk.options.bookie import RELOADED
from pybk.options.settings import missing

if TYPE_CHECKING:
    from pybk.bookie.server import BookieServer
    from pybk.ledger.ledger_metadata import Bookie
    from pybk.operations.cluster_admin import ClusterAdmin
    from pybk.operations.cluster_checks import BookieStatus, DrainProgress

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_SECONDS: Final = 1.0
"""The shortest time between two looks at a drain."""

_EMPTYING: Final = ("draining", "drained")

_POLL_SHARE: Final = 10
"""A look at a drain reads the metadata of all ledgers; the wait before the next one is this many times as long."""


def _serve(parsed: argparse.Namespace) -> int:
    settings = settings_given(parsed)
    absent = [option.flag for option in missing(settings)]
    if absent:
        parsed.parser.error(
            f"the following arguments are required: {', '.join(absent)}; or the same in --config FILE or in the "
            "environment, as `pybk config show` lists it"
        )
    given = argparse.Namespace(**vars(parsed))
    parsed.path = settings["bookie.directory"].value
    check_path(parsed)
    directory_of(parsed)
    with secret_needed():
        what = settings_of(settings)
    service_log.begin(what.log_format, what.log_level)

    def ready(bookie: BookieServer, http: str) -> None:
        name, addresses = bookie.bookie.bookie_id, list(bookie.addresses)
        if parsed.json:
            print_json_line({"bookie": name, "addresses": addresses, "http": http})
        else:
            shown = f", probes and metrics at {http}" if http else ""
            print(f"bookie {name} serves at {', '.join(addresses)}{shown}")
        sys.stdout.flush()

    def reload() -> BookieSettings:
        new = settings_given(given)
        later = [name for name, each in new.items() if each.value != settings[name].value and name not in RELOADED]
        if later:
            logger.warning("%s changed, and will take effect at the next start", ", ".join(later))
        return settings_of(new)

    with secret_needed():
        if serve(what, ready=ready, reload=reload):
            return SOUND
    print("pybk: the bookie serves no more; the error is logged above", file=sys.stderr)
    return DAMAGED


# ---- verbs ---------------------------------------------------------------------------------------------------------


def _list(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        return watch(parsed, lambda: _print_list(parsed, admin.bookies(removed=parsed.removed)))


def _print_list(parsed: argparse.Namespace, bookies: Iterable[BookieStatus]) -> int:
    if parsed.json:
        print_json({"bookies": [_as_json(each) for each in bookies]})
        return SOUND
    rows = [
        (
            each.name,
            each.state,
            shown_time(each.until_ns or each.since_ns),
            _runs(each),
            each.location,
            each.version,
            " ".join(each.addresses),
            "; ".join(
                f"{name}: {shown_bytes(one.free_bytes)}" for name, one in operations.space_by_tiers([each]).items()
            ),
        )
        for each in bookies
    ]
    print_table(rows, ("bookie", "state", "until or since (UTC)", "runs", "location", "pybk", "addresses", "free"))
    return SOUND


def _runs(each: BookieStatus) -> str:
    return "read-only" if each.registered and each.read_only else "yes" if each.registered else "no"


def _show(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        found = {each.name: each for each in admin.bookies(removed=True)}
        progress = admin.drain_progress(parsed.name)
        each = found[parsed.name]
    if parsed.json:
        print_json({**_as_json(each), "ledgers": progress.ledgers_left, "bytes": progress.bytes_left})
        return SOUND
    rows = [
        ("bookie", each.bookie),
        ("state", f"{each.state} since {shown_time(each.since_ns) or 'its first start'}"),
        ("until (UTC)", shown_time(each.until_ns) or "no end"),
        ("runs", _runs(each)),
        ("location", each.location or "unknown"),
        ("pybk", each.version or "unknown"),
        ("addresses", " ".join(each.addresses) or "none"),
        ("ledgers that name it", f"{progress.ledgers_left}, {shown_bytes(progress.bytes_left)} of closed fragments"),
    ]
    for tier, free in each.free_bytes.items():
        size = each.capacity_bytes.get(tier)
        rows.append((f"free in {tier}", shown_bytes(free) + (f" of {shown_bytes(size)}" if size else "")))
    rows += [("stuck", f"ledger {mark.ledger_id}: {mark.error or mark.reason}") for mark in progress.stuck]
    rows += [("before it can be removed", text) for text in progress.waits]
    print_table(rows, ())
    return SOUND


def _as_json(each: BookieStatus) -> dict[str, Any]:
    return {
        **_bookie_as_json(each.bookie),
        "state": each.state,
        "since_ns": each.since_ns,
        "until_ns": each.until_ns,
        "registered": each.registered,
        "absent": each.absent,
        "read_only": each.read_only,
        "location": each.location,
        "version": each.version,
        "addresses": list(each.addresses),
        "free_bytes": {str(tier): free for tier, free in each.free_bytes.items()},
        "capacity_bytes": {str(tier): size for tier, size in each.capacity_bytes.items()},
        "devices": {str(tier): device for tier, device in each.devices.items()},
    }


def _bookie_as_json(bookie: Bookie) -> dict[str, Any]:
    return {"bookie": bookie.bookie_id, "instance": bookie.instance.hex()}


def _drain(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        try:
            progress = _patiently(parsed, partial(admin.drain, parsed.name))
            _print_progress(parsed, progress)
            return _wait(parsed, admin, progress) if parsed.wait else SOUND
        except KeyboardInterrupt:  # which may come at once after the drain took effect
            print(
                f"the drain continues; `pybk bookie cancel-drain {parsed.path} {parsed.name}` ends it", file=sys.stderr
            )
            raise


def _patiently(parsed: argparse.Namespace, call: Callable[..., T]) -> T:
    """Make a call; with ``--wait`` repeat it while it is refused for a reason that passes by itself."""
    try:
        return call()
    except SafetyCheckError as error:
        if not (parsed.wait and error.passing):
            raise
        print_note(parsed, f"waits: {error}")
        return call(wait_s=float("inf"))


def _wait(parsed: argparse.Namespace, admin: ClusterAdmin, progress: DrainProgress) -> int:
    """Wait until a bookie can be removed; returns 1 if its drain was cancelled, or if what is left does not proceed."""
    total, noted = progress.bytes_left, set[str]()
    with progress_bar(parsed, f"drain of {parsed.name}") as show:
        while not progress.done and progress.state in _EMPTYING:
            if progress.ledgers_left and len({mark.ledger_id for mark in progress.stuck}) >= progress.ledgers_left:
                break
            began = time.monotonic()
            new = admin.drain_progress(parsed.name)
            if _visible(new) != _visible(progress):
                _print_progress(parsed, new)
            for text in new.waits:
                if text not in noted:
                    print_note(parsed, f"waits: {text}")
            noted.update(new.waits)
            progress, total = new, max(total, new.bytes_left)
            show(total - progress.bytes_left, total)
            if not progress.done:
                time.sleep(max(_POLL_SECONDS, _POLL_SHARE * (time.monotonic() - began)))
    if progress.done:
        return SOUND
    for mark in progress.stuck:
        print(f"ledger {mark.ledger_id} is {mark.state}: {mark.error or mark.reason}", file=sys.stderr)
    print(f"bookie {parsed.name} is {progress.state}, and its drain does not proceed", file=sys.stderr)
    return DAMAGED


def _visible(progress: DrainProgress) -> tuple[Any, ...]:
    """Return what a line of progress shows."""
    return progress.state, progress.ledgers_left, progress.bytes_left, progress.stuck


def _print_progress(parsed: argparse.Namespace, progress: DrainProgress) -> None:
    if parsed.json:
        values = {
            **_bookie_as_json(progress.bookie),
            "state": progress.state,
            "ledgers_left": progress.ledgers_left,
            "bytes_left": progress.bytes_left,
            "stuck": [mark_as_json(mark) for mark in progress.stuck],
            "waits": list(progress.waits),
        }
        print_json_line(values)
    else:
        print(
            f"bookie {progress.bookie.bookie_id} is {progress.state}: {counted(progress.ledgers_left, 'ledger')} left, "
            f"{shown_bytes(progress.bytes_left)}, {len(progress.stuck)} stuck"
        )
    sys.stdout.flush()


def _cancel_drain(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        _print_state(parsed, admin.cancel_drain(parsed.name))
    return SOUND


def _maintenance(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        if parsed.end:
            _print_state(parsed, admin.end_maintenance(parsed.name))
        else:
            _print_state(parsed, admin.maintenance(parsed.name, parsed.seconds))
    return SOUND


def _print_state(parsed: argparse.Namespace, status: BookieStatus) -> None:
    if parsed.json:
        print_json(_as_json(status))
    else:
        until = f" until {shown_time(status.until_ns)} UTC" if status.until_ns else ""
        print(f"bookie {status.name} is {status.state}{until}")


def _ok_to_stop(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        check = admin.ok_to_stop(*dict.fromkeys(parsed.names))
    if parsed.json:
        print_json({"ok": check.ok, "refusals": check.refusals, "warnings": check.warnings})
    else:
        for text in check.refusals:
            print(f"refused: {text}")
        for text in check.warnings:
            print(f"warning: {text}")
        print(f"{', '.join(parsed.names)}: {'ok to stop' if check.ok else 'not ok to stop'}")
    return SOUND if check.ok else REFUSED


def _ok_to_remove(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        try:
            proof = _patiently(parsed, partial(admin.ok_to_remove, parsed.name))
        except SafetyCheckError as error:
            if not parsed.json:
                raise
            print_json({"ok": False, "bookie": parsed.name, "refusals": error.failures})
            return REFUSED
    if parsed.json:
        values = {"state": proof.state, "state_since_ns": proof.state_since_ns, "scanned_ns": proof.scanned_ns}
        print_json({"ok": True, "refusals": [], **_bookie_as_json(proof.bookie), **values, "ledgers": proof.ledgers})
    else:
        print(f"{parsed.name}: ok to remove; none of {counted(proof.ledgers, 'ledger')} needs it")
    return SOUND


def _remove(parsed: argparse.Namespace) -> int:
    with admin_of(parsed) as admin:
        proof = None
        if parsed.accept_loss is None:
            proof = _patiently(parsed, partial(admin.ok_to_remove, parsed.name))
        if parsed.dry_run:
            lost = f"; the copies of {counted(len(parsed.accept_loss), 'ledger')} are given up" if proof is None else ""
            return print_result(
                parsed,
                {"bookie": parsed.name, "lost_ledgers": parsed.accept_loss or [], "dry_run": True},
                f"bookie {parsed.name} would be removed for good{lost}",
            )
        lost = "" if proof is not None else f" with its copies of ledgers {' '.join(map(str, parsed.accept_loss))}"
        confirm(parsed, parsed.name, f"bookie {parsed.name} is removed for good{lost}")
        if proof is None:
            removed = admin.remove(parsed.name, accept_loss=parsed.accept_loss)
        else:
            removed = admin.remove(parsed.name, proof)
    _print_state(parsed, removed)
    return SOUND


VERBS: Final[Verbs] = {
    "serve": _serve,
    "list": _list,
    "show": _show,
    "probe": probe,
    "drain": _drain,
    "cancel-drain": _cancel_drain,
    "maintenance": _maintenance,
    "ok-to-stop": _ok_to_stop,
    "ok-to-remove": _ok_to_remove,
    "remove": _remove,
}
"""The verbs of ``pybk bookie``."""
