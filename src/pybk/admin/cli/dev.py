"""The command ``pybk dev``: a cluster of real processes on this host, and faults."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from pybk.admin.cli.command_parser import Verbs
from pybk.admin.cli.output import DAMAGED, SOUND, counted, print_json, print_json_line, print_table
from pybk.admin.dev.dev_cluster import BOOKIES_MAX, STATE, DevCluster, DevOptions
from pybk.admin.dev.members import Member
from pybk.admin.http.extra import missing
from pybk.admin.profiles import Profile, path_of
from pybk.admin.signals import STOPS, Signals
from pybk.credentials import cut_value
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.options.kinds import KINDS

PROFILE: Final = "dev"
"""The profile of a local cluster unless ``--profile`` names another one."""

_FOLLOW_SECONDS: Final = 0.2


def count(text: str) -> int:
    """Return the number of bookies that a text names."""
    try:
        found: int = KINDS["whole"].of_text(text)
        DevOptions(bookies=found).check()
    except (ValueError, UsageError):
        raise argparse.ArgumentTypeError(
            f"{cut_value(text, 50)} is not accepted, it takes a whole number from 1 to {BOOKIES_MAX}"
        ) from None
    return found


# ---- up and down -----------------------------------------------------------------------------------------------------


def _up(parsed: argparse.Namespace) -> int:
    began = time.monotonic()
    directory = _directory(parsed)
    if os.path.exists(os.path.join(directory, STATE)):
        cluster = DevCluster.found(directory)
        if parsed.count not in (None, cluster.options.bookies):
            raise UsageError(
                f"the cluster in {directory} has {cluster.options.bookies} bookies, and {parsed.count} are asked for; "
                "`pybk dev purge` removes it"
            )
        _check_same(parsed, cluster)
    else:
        options = DevOptions(
            bookies=3 if parsed.count is None else parsed.count,
            any_port=parsed.any_port,
            zones=parsed.zones,
            tiers=parsed.tiers,
        )
        cluster = DevCluster.made(directory, _name(parsed), options)
    cluster.write_profile()
    with cluster.locked():
        cluster.start()
    _print_started(parsed, cluster, time.monotonic() - began)
    if parsed.foreground:
        signals = Signals()
        while signals.wait() not in STOPS:
            pass
        with cluster.locked():
            _note(cluster.stop())
    return SOUND


def _check_same(parsed: argparse.Namespace, cluster: DevCluster) -> None:
    """Raise UsageError if a cluster that is there was made with other options than those that are given now."""
    for name in ("any_port", "zones", "tiers"):
        wanted, has = getattr(parsed, name), getattr(cluster.options, name)
        if wanted and wanted != has:
            flag = f"--{name.replace('_', '-')}{'' if wanted is True else f' {wanted}'}"
            raise UsageError(
                f"the cluster in {cluster.directory} was made without {flag}; "
                "leave that out, or `pybk dev purge` removes the cluster"
            )


def _name(parsed: argparse.Namespace) -> str:
    """Return the name of the profile of a local cluster."""
    return str(parsed.profile or PROFILE)


def _directory(parsed: argparse.Namespace) -> str:
    """Return where a new cluster is to lie, or where that of the profile lies."""
    if parsed.directory is not None:
        return os.path.abspath(str(parsed.directory))
    if os.path.exists(path_of(_name(parsed))):
        return _profile(parsed).directory
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(home, "pybk", _name(parsed))


def _profile(parsed: argparse.Namespace) -> Profile:
    profile = Profile.read(_name(parsed))
    if not profile.directory:
        raise UsageError(f"the profile {profile.name!r} is of {profile.metadata}, which `pybk dev up` has not made")
    return profile


def _cluster(parsed: argparse.Namespace) -> DevCluster:
    return DevCluster.found(_profile(parsed).directory)


def _note(notes: list[str]) -> None:
    for each in notes:
        print(f"pybk: {each}", file=sys.stderr)


def _print_started(parsed: argparse.Namespace, cluster: DevCluster, seconds: float) -> None:
    if parsed.json:
        print_json({**_as_json(cluster), "took_s": seconds})
    else:
        _print_members(cluster)
        serving = counted(len(cluster.bookies), "bookie serves", "bookies serve")
        print(f"\n{serving} after {seconds:.1f} s, in {cluster.directory}")
        print(f"metadata: {cluster.url}   its secret: {cluster.secret_file}")
        print(f"a secret for ledgers: export PYBK_SECRET_FILE={cluster.path('ledger-secret')}")
        if cluster.page:
            print(f"the page: {cluster.page}   its token, for changes: {cluster.path('token')}")
        else:
            print(f"there is no page: {missing()}")
        print("\nnext:")
        print(f"  export PYBK_PROFILE={cluster.profile}")
        print("  pybk cluster status")
        print(f"  pybk dev kill {cluster.bookies[-1].name}")
    sys.stdout.flush()


def _down(parsed: argparse.Namespace) -> int:
    cluster = _cluster(parsed)
    with cluster.locked():
        _note(cluster.stop())
    return SOUND


def _purge(parsed: argparse.Namespace) -> int:
    cluster = _cluster(parsed)
    with cluster.locked():
        _note(cluster.stop())
        others = cluster.purge()
    if others:
        _note([f"{cluster.directory} stays, because others have made {', '.join(others)} there"])
    return SOUND


# ---- looking ---------------------------------------------------------------------------------------------------------


def _status(parsed: argparse.Namespace) -> int:
    cluster = _cluster(parsed)
    if parsed.prometheus:
        print(_scrape_configuration(cluster), end="")
    elif parsed.json:
        print_json(_as_json(cluster))
    else:
        _print_members(cluster)
        print(f"\nmetadata: {cluster.url}   its secret: {cluster.secret_file}")
        print(f"the page: {cluster.page or 'none'}   directory: {cluster.directory}")
    return SOUND if all(each.state() == "running" for each in cluster.wanted()) else DAMAGED


def _faults(cluster: DevCluster, member: Member) -> list[str]:
    faults = cluster.faults(member)
    found = [f"writes take {faults.slow_ms:g} ms longer"] if faults.slow_ms else []
    return found + (["devices are full"] if faults.full else [])


def _print_members(cluster: DevCluster) -> None:
    rows = [
        (each.name, each.state(), each.pid, each.zone, each.address, each.http, ", ".join(_faults(cluster, each)))
        for each in cluster.members.values()
    ]
    print_table(rows, ("name", "state", "pid", "zone", "address", "http", "faults"))


def _as_json(cluster: DevCluster) -> dict[str, Any]:
    return {
        "schema": 1,
        "profile": cluster.profile,
        "directory": cluster.directory,
        "metadata": cluster.url,
        "secret_file": cluster.secret_file,
        "token_file": cluster.path("token"),
        "page": cluster.page,
        "members": [
            {
                "name": each.name,
                "state": each.state(),
                "pid": each.pid,
                "zone": each.zone,
                "address": each.address,
                "http": each.http,
                "metrics": f"{each.http}/metrics" if each.http else "",
                "log": cluster.path("logs", f"{each.name}.log"),
                "faults": _faults(cluster, each),
            }
            for each in cluster.members.values()
        ],
    }


def _scrape_configuration(cluster: DevCluster) -> str:
    targets = "".join(
        f'          - "{each.http.partition("//")[2]}"\n' for each in cluster.members.values() if each.http
    )
    return (
        "scrape_configs:\n"
        "  - job_name: pybk\n"
        "    scrape_interval: 5s\n"
        "    static_configs:\n"
        "      - targets:\n"
        f"{targets}"
        f"        labels: {{cluster: {cluster.profile}}}\n"
    )


def _logs(parsed: argparse.Namespace) -> int:
    cluster = _cluster(parsed)
    names = [cluster.member(name).name for name in parsed.names] or list(cluster.members)
    files = {name: open(cluster.path("logs", f"{name}.log"), encoding="utf-8", errors="replace") for name in names}  # noqa: SIM115
    try:
        for name, file in files.items():
            _print_lines(parsed, name, file.readlines()[-parsed.lines :] if parsed.lines else [])
        while parsed.follow:
            for name, file in files.items():
                _print_lines(parsed, name, file.readlines())
            sys.stdout.flush()
            time.sleep(_FOLLOW_SECONDS)
    finally:
        for file in files.values():
            file.close()
    return SOUND


def _print_lines(parsed: argparse.Namespace, name: str, lines: list[str]) -> None:
    for line in lines:
        if parsed.json:
            print_json_line({"name": name, "line": line.rstrip()})
        else:
            print(f"{name}: {line.rstrip()}")


# ---- one process, and faults -----------------------------------------------------------------------------------------


def _start(parsed: argparse.Namespace) -> int:
    cluster = _cluster(parsed)
    with cluster.locked():
        cluster.start(parsed.names, [f"--{name}" for name in ("replace", "moved") if getattr(parsed, name)])
    return SOUND


def _stop(parsed: argparse.Namespace) -> int:
    cluster = _cluster(parsed)
    with cluster.locked():
        _note(cluster.stop(parsed.names))
    return SOUND


def _restart(parsed: argparse.Namespace) -> int:
    cluster = _cluster(parsed)
    with cluster.locked():
        _note(cluster.stop(parsed.names))
        cluster.start(parsed.names)
    return SOUND


def _fault(name: str) -> Callable[[argparse.Namespace], int]:
    """Return a command that makes a fault of each process that is named."""

    def run(parsed: argparse.Namespace) -> int:
        cluster = _cluster(parsed)
        with cluster.locked():
            for each in parsed.names:
                getattr(cluster, name)(each)
        return SOUND

    return run


def _slow(parsed: argparse.Namespace) -> int:
    cluster = _cluster(parsed)
    with cluster.locked():
        for each in parsed.names:
            cluster.slow(each, 0.0 if parsed.end else parsed.ms)
    return SOUND


def _fill(parsed: argparse.Namespace) -> int:
    cluster = _cluster(parsed)
    tier = None if parsed.tier is None else StorageHint(parsed.tier)
    with cluster.locked():
        for each in parsed.names:
            cluster.fill(each, tier, end=parsed.end)
    return SOUND


def _corrupt(parsed: argparse.Namespace) -> int:
    cluster = _cluster(parsed)
    with cluster.locked():
        for each in parsed.names:
            print(f"{each}: a bit in {counted(cluster.corrupt(each, parsed.records), 'record')}")
    return SOUND


VERBS: Final[Verbs] = {
    "up": _up,
    "status": _status,
    "logs": _logs,
    "down": _down,
    "purge": _purge,
    "stop": _stop,
    "start": _start,
    "restart": _restart,
    "kill": _fault("kill"),
    "pause": _fault("pause"),
    "resume": _fault("resume"),
    "slow": _slow,
    "fill": _fill,
    "wipe": _fault("wipe"),
    "corrupt": _corrupt,
}
"""The verbs of ``pybk dev``."""
