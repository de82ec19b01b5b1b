"""A local cluster: N bookies and the console, each a process of its own, and all their files in one directory.

| in the directory | what |
|---|---|
| ``dev.json`` | the members and their processes; a directory without it was not made here, and is left alone |
| ``cluster-secret`` | the secret of the cluster, for its owner alone |
| ``ledger-secret`` | a secret for ledgers of the cluster |
| ``token``, ``tokens`` | a token of the scope admin, and what the console keeps of it |
| ``ports`` | the HTTP ports of the bookies, for the console |
| ``metadata`` | the metadata store, LMDB |
| ``data/NAME``, ``devices/NAME-TIER`` | the directories of a bookie |
| ``logs/NAME.log`` | the log of a process |
| ``faults/NAME`` | the faults of a bookie's disks |
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Final

from pybk.admin.dev.corruption import flip_bits
from pybk.admin.dev.disk_faults import DiskFaults
from pybk.admin.dev.members import (
    CONSOLE,
    START_SECONDS,
    Member,
    Started,
    environment_of_members,
    kill,
    stop_all,
)
from pybk.admin.http.extra import missing
from pybk.admin.http.tokens import Scope, Token
from pybk.admin.profiles import Profile, path_of
from pybk.credentials import Secret
from pybk.errors import PybkError, UsageError
from pybk.flags import StorageHint
from pybk.manager.connect import open_cluster
from pybk.storage.io.filesystem import OsFileSystem, replace_file

STATE: Final = "dev.json"
PORTS: Final = "ports"
_SCHEMA: Final = 1
_OWN: Final = (
    *("data", "devices", "logs", "faults", "metadata", "cluster-secret", "cluster-secret.next", "token", "tokens"),
    "ledger-secret",
    *(PORTS, f"{PORTS}.new", f"{STATE}.new", STATE),
)
"""The files that a cluster makes in its directory; the one that marks the directory as a cluster's is removed last."""

BOOKIE_PORTS: Final = 3180
"""Bookie N listens on this port plus N, unless any port will do."""

HTTP_PORTS: Final = 9460
"""The console listens on this port, and bookie N shows itself on this port plus N."""

BOOKIES_MAX: Final = 99

SLOW_MS_MAX: Final = 60_000
"""The most milliseconds by which a durable write can be delayed."""

_DRAIN: Final = ("--drain-s=2", "--drain-idle-s=0.2")


@dataclass(frozen=True, slots=True, kw_only=True)
class DevOptions:
    """The options of a local cluster.

    Attributes:
        bookies: The number of bookies.
        any_port: Whether it uses any free ports.
        zones: The number of zones over which the bookies are spread; 0 for none.
        tiers: Whether each tier has a directory of its own.
    """

    bookies: int = 3
    any_port: bool = False
    zones: int = 0
    tiers: bool = False

    def check(self) -> None:
        """Raise UsageError if a value is not valid."""
        if not 1 <= self.bookies <= BOOKIES_MAX:
            raise UsageError(f"{self.bookies} bookies; a local cluster has 1 to {BOOKIES_MAX}")
        if not 0 <= self.zones <= self.bookies:
            raise UsageError(f"{self.zones} zones for {self.bookies} bookies; each zone needs one, and 0 is for none")


@dataclass(slots=True, kw_only=True)
class DevCluster:
    """A local cluster; use ``made`` or ``found``.

    Attributes:
        directory: Its directory.
        profile: The name of its profile.
        options: Its options.
        members: Its processes by name, the console last.
    """

    directory: str
    profile: str
    options: DevOptions
    members: dict[str, Member] = field(default_factory=dict)

    # ---- the directory -----------------------------------------------------------------------------------------------

    @classmethod
    def found(cls, directory: str) -> DevCluster:
        """Return the cluster in a directory.

        Raises:
            UsageError: ``pybk dev up`` has made none there.
        """
        path = os.path.join(directory, STATE)
        try:
            with open(path, encoding="utf-8") as file:
                state = json.load(file)
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(
                f"`pybk dev up` has made no cluster in {directory}: there is no {STATE}, so nothing there is touched"
            ) from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}; nothing was changed") from error
        if state.get("schema") != _SCHEMA:
            raise UsageError(f"{path} was written by another version of pybk; nothing was changed")
        members = {each["name"]: Member(**each) for each in state["members"]}
        return cls(
            directory=directory, profile=state["profile"], options=DevOptions(**state["options"]), members=members
        )

    @classmethod
    def made(cls, directory: str, profile: str, options: DevOptions) -> DevCluster:
        """Make a cluster in a directory that does not exist or is empty.

        Raises:
            UsageError: The directory has files of other origin; the profile is of another cluster; or the options are
                not valid.
        """
        options.check()
        if os.path.exists(path_of(profile)) and (before := Profile.read(profile)).directory != directory:
            raise UsageError(
                f"the profile {profile!r} is that of {before.metadata}; use another name: `pybk --profile NAME dev up`"
            )
        if os.path.isdir(directory) and os.listdir(directory):
            raise UsageError(
                f"{directory} has files that `pybk dev up` has not made (there is no {STATE}); nothing was changed: "
                "name another directory, or move them away"
            )
        OsFileSystem().make_directory(directory)
        cluster = cls(directory=directory, profile=profile, options=options)
        for number in range(1, options.bookies + 1):
            zone = f"zone-{(number - 1) % options.zones + 1}" if options.zones else ""
            cluster.members[f"b{number}"] = Member(name=f"b{number}", zone=zone)
        cluster.members[CONSOLE] = Member(name=CONSOLE)
        try:
            cluster.make_files()
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)  # or the next try would find a cluster without a secret
            raise
        return cluster

    def make_files(self) -> None:
        """Make the files of a new cluster; the last one marks the directory as a cluster's."""
        for name in ("data", "devices", "logs", "faults"):
            os.mkdir(self.path(name))
        kept, text = Token.new("dev", Scope.ADMIN)
        for name, content in (
            ("cluster-secret", secrets.token_hex(32)),
            ("ledger-secret", secrets.token_hex(32)),
            ("token", text),
            ("tokens", kept.line()),
        ):
            replace_file(OsFileSystem(), self.path(name), content.encode())
        metadata, _ = open_cluster(self.url, self.secret, create=True)
        metadata.close()
        self.save()

    def path(self, *names: str) -> str:
        """Return a path below the directory."""
        return os.path.join(self.directory, *names)

    def save(self) -> None:
        """Write the state, durably: without it the directory is not that of a cluster."""
        state = {
            "schema": _SCHEMA,
            "profile": self.profile,
            "options": asdict(self.options),
            "members": [asdict(each) for each in self.members.values()],
        }
        ports = "".join(f'{each.name} = "{each.http}"\n' for each in self.bookies if each.http)
        replace_file(OsFileSystem(), self.path(STATE), json.dumps(state, indent=2).encode())
        replace_file(OsFileSystem(), self.path(PORTS), ports.encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other commands from changing the cluster meanwhile.

        Raises:
            UsageError: Another one is changing it.
        """
        directory = os.open(self.directory, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.members = DevCluster.found(self.directory).members
            yield
        except BlockingIOError:
            raise UsageError(f"another `pybk dev` is changing the cluster in {self.directory}; wait for it") from None
        finally:
            os.close(directory)

    @property
    def url(self) -> str:
        """The URL of its metadata store."""
        return f"lmdb://{self.path('metadata')}"

    @property
    def secret_file(self) -> str:
        """The file of its secret."""
        return self.path("cluster-secret")

    @property
    def secret(self) -> Secret:
        """Its secret."""
        return Secret(file=self.secret_file, private=True)

    @property
    def bookies(self) -> list[Member]:
        """Its bookies."""
        return [each for each in self.members.values() if each.name != CONSOLE]

    @property
    def console(self) -> Member:
        """Its console."""
        return self.members[CONSOLE]

    @property
    def page(self) -> str:
        """The URL of its page; empty if there is none."""
        return f"{self.console.http}/" if self.console.http else ""

    def wanted(self) -> list[Member]:
        """Return its members that should run: all, or without the packages for HTTP all except the console."""
        return self.bookies if missing() else list(self.members.values())

    def bookie(self, name: str) -> Member:
        """Return a bookie; raises UsageError if there is none with the name."""
        found = self.member(name)
        if found.name == CONSOLE:
            raise UsageError(f"{CONSOLE} is not a bookie; there are {', '.join(each.name for each in self.bookies)}")
        return found

    def member(self, name: str) -> Member:
        """Return a bookie or the console; raises UsageError if there is none with the name."""
        found = self.members.get(name)
        if found is None:
            raise UsageError(f"there is no {name!r:.50} in {self.directory}; there are {', '.join(self.members)}")
        return found

    def write_profile(self) -> None:
        """Write the profile by which commands find the cluster."""
        Profile(name=self.profile, metadata=self.url, secret_file=self.secret_file, directory=self.directory).write()

    # ---- up and down -------------------------------------------------------------------------------------------------

    def start(self, names: Sequence[str] = (), options: Sequence[str] = ()) -> None:
        """Start members that do not run; returns once they serve.

        Args:
            names: The names of the members; without names, all that should run.
            options: More options of ``pybk bookie`` for this start, such as ``--replace``; the console takes none.

        Raises:
            UsageError: A port is taken.
            PybkError: One of them does not serve; the text has the end of its log. The others do.
        """
        wanted = [self.member(name) for name in names] or self.wanted()
        resting = [each for each in wanted if not each.is_alive()]
        for each in resting:
            self._check_ports(each)
        environment = environment_of_members()
        begun = []
        for each in resting:
            lost = self._is_lost(each)  # before the start, which makes the directory
            started = Started(replace(each, lost=lost), self._arguments(each, options), self.path("logs"), environment)
            self.members[each.name] = started.member
            begun.append(started)
        self.save()
        problems = []
        until = time.monotonic() + START_SECONDS
        for started in begun:
            try:
                said = started.wait(until)
            except PybkError as error:
                name = started.member.name
                problems.append(
                    f"{name} has lost its data; it is refused until you confirm this: `pybk dev start {name} --replace`"
                    f" begins anew under its name; `pybk dev logs {name}` shows the refusal"
                    if started.member.lost and "--replace" not in options
                    else str(error)
                )
                continue
            address = said["addresses"][0] if "addresses" in said else ""
            member = replace(started.member, address=address, http=said["http"], lost=False)
            self.members[member.name] = member
        self.save()
        if problems:
            raise PybkError("; ".join(problems))

    def _is_lost(self, member: Member) -> bool:
        """Return whether a bookie has served, and its directory was removed since."""
        return member.lost or (bool(member.address) and not os.path.isdir(self._data(member)))

    def _check_ports(self, member: Member) -> None:
        for host, port in self._ports(member):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, port))
                except OSError as error:
                    raise UsageError(
                        f"port {port} of {member.name} cannot be used: {error.strerror}; end what has it, or make the "
                        "cluster with --any-port"
                    ) from error

    def _ports(self, member: Member) -> list[tuple[str, int]]:
        """Return the ports of a member, its own and that of HTTP; 0 stands for any."""
        number = 0 if member.name == CONSOLE else int(member.name[1:])
        found = []
        if number:
            kept = int(member.address.rpartition(":")[2]) if member.address else 0
            found.append(kept or (0 if self.options.any_port else BOOKIE_PORTS + number))
        kept = int(member.http.rpartition(":")[2]) if member.http else 0
        found.append(kept or (0 if self.options.any_port else HTTP_PORTS + number))
        return [("127.0.0.1", port) for port in found]

    def _arguments(self, member: Member, options: Sequence[str]) -> list[str]:
        """Return what Python runs for a member."""
        given = ["--json", f"--cluster-secret-file={self.secret_file}"]
        ports = [port for _, port in self._ports(member)]
        if member.name == CONSOLE:
            http = [
                f"--http=127.0.0.1:{ports[0]}",
                f"--http-tokens={self.path('tokens')}",
                f"--bookies={self.path(PORTS)}",
                f"--name={self.profile}",
            ]
            return ["-m", "pybk", "--profile", self.profile, "console", self.url, *http, *given]
        given += [
            f"--id={member.name}",
            f"--listen=tcp://127.0.0.1:{ports[0] or '*'}",
            f"--metadata={self.url}",
            *([] if missing() else [f"--http=127.0.0.1:{ports[1]}"]),
            *_DRAIN,
        ]
        if member.zone:
            given.append(f"--rack={member.zone}")
        if self.options.tiers:
            given += [f"--tier-{tier.value}={self._device(member, tier)}" for tier in StorageHint]
        module = ["-m", "pybk.admin.dev.disk_faults", self._faults_file(member)]
        return [*module, "bookie", self._data(member), *given, *options]

    def stop(self, names: Sequence[str] = ()) -> list[str]:
        """End members, all if none are named, the console first; return sentences about unusual events."""
        wanted = [self.member(name) for name in names] or list(self.members.values())
        notes: list[str] = []
        stop_all(sorted(wanted, key=lambda each: each.name != CONSOLE), notes.append)
        return notes

    def purge(self) -> list[str]:
        """Remove the files of the cluster and its profile; all members must have ended.

        Returns:
            The names of files in the directory that others have made, which stay there.

        Raises:
            UsageError: A member runs.
        """
        running = [each.name for each in self.members.values() if each.is_alive()]
        if running:
            raise UsageError(f"{', '.join(running)} still run; `pybk dev down` ends them")
        path = path_of(self.profile)
        if os.path.exists(path) and Profile.read(self.profile).directory == self.directory:
            os.unlink(path)
        for name in (*(f"{each}.tmp" for each in _OWN), *_OWN):
            own = self.path(name)
            if os.path.isdir(own) and not os.path.islink(own):
                shutil.rmtree(own)
            elif os.path.lexists(own):
                os.unlink(own)
        others = sorted(os.listdir(self.directory))
        if not others:
            os.rmdir(self.directory)
        return others

    # ---- faults ------------------------------------------------------------------------------------------------------

    def _data(self, member: Member) -> str:
        return self.path("data", member.name)

    def _device(self, member: Member, tier: StorageHint) -> str:
        return self.path("devices", f"{member.name}-{tier.value}")

    def _faults_file(self, member: Member) -> str:
        return self.path("faults", member.name)

    def faults(self, member: Member) -> DiskFaults:
        """Return the faults of a bookie's disks."""
        return DiskFaults.read(self._faults_file(member))

    def kill(self, name: str) -> None:
        """Kill a member with SIGKILL."""
        kill(self.member(name))

    def pause(self, name: str) -> None:
        """Stop a member with SIGSTOP: it neither answers nor ends."""
        self.member(name).signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Let a paused member continue."""
        self.member(name).signal(signal.SIGCONT)

    def slow(self, name: str, slow_ms: float) -> None:
        """Delay each durable write of a bookie by this time; 0 ends the delay.

        Raises:
            UsageError: The delay is too long.
        """
        if not 0 <= slow_ms <= SLOW_MS_MAX:
            raise UsageError(f"{slow_ms:g} ms longer; a write can take 0 to {SLOW_MS_MAX} ms longer")
        bookie = self.bookie(name)
        replace(self.faults(bookie), slow_ms=slow_ms).write(self._faults_file(bookie))

    def fill(self, name: str, tier: StorageHint | None, *, end: bool = False) -> None:
        """Make the devices of a bookie full, or end that.

        Args:
            name: The bookie.
            tier: The tier; None for all.
            end: Whether they have space again.
        """
        bookie = self.bookie(name)
        faults = self.faults(bookie)
        paths = {path for each in StorageHint if tier in (None, each) for path in self._tier_paths(bookie, each)}
        if tier is None:
            paths.add(self._data(bookie))
        full = set(faults.full) - paths if end else set(faults.full) | paths
        replace(faults, full=tuple(sorted(full))).write(self._faults_file(bookie))

    def _tier_paths(self, bookie: Member, tier: StorageHint) -> list[str]:
        return [self._device(bookie, tier)] if self.options.tiers else [os.path.join(self._data(bookie), tier.value)]

    def wipe(self, name: str) -> None:
        """Kill a bookie, and remove all its files, as if its disks were lost."""
        bookie = self.bookie(name)
        if bookie.is_alive():
            kill(bookie)
        for path in (self._data(bookie), *(self._device(bookie, tier) for tier in StorageHint)):
            if os.path.isdir(path):
                shutil.rmtree(path)

    def corrupt(self, name: str, count: int) -> int:
        """Flip a bit in sealed records of a bookie, which may run; return their number.

        Raises:
            UsageError: It has no sealed record yet.
        """
        bookie = self.bookie(name)
        flipped = flip_bits(self._data(bookie), count)
        if not flipped:
            raise UsageError(
                f"{name} has no sealed record yet, only those that its next start reads again; append something, and "
                f"`pybk dev restart {name}` seals it"
            )
        return flipped
