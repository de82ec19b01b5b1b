"""Apache BookKeeper as a peer: its own server and Java client, in a cluster of three bookies on this machine.

Maven fetches the jars and compiles the client (``Drive.java``), once, into ``build/bookkeeper``. ZooKeeper, each bookie
and the client are processes of their own. The bookies have their defaults, but ``journalFlushWhenQueueEmpty``: without
it each lone append waits 2 ms for others to share its sync.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

from bench.cluster.bookies import process_cpu_seconds
from bench.cluster.ports import free_ports
from bench.contest import Run, Scale

NAME: Final = "BookKeeper"
SOURCE: Final = Path(__file__).resolve().parent
BUILT: Final = SOURCE.parents[2] / "build" / "bookkeeper"
CLASSPATH: Final = BUILT / "classpath"
BOOKIES: Final = 3
START_SECONDS: Final = 60.0
WARM_TURNS: Final = 10
"""The turns before the first one that counts, in which Java compiles what is used often."""

_LOGGING: Final = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration><Appenders><Console name="out" target="SYSTEM_ERR"><PatternLayout pattern="%d %p %c %m%n"/></Console>
</Appenders><Loggers><Root level="warn"><AppenderRef ref="out"/></Root></Loggers></Configuration>
"""


def why_not() -> str:
    """Fetch and compile what is needed; return why that is impossible, "" if it is there."""
    if CLASSPATH.exists() and all(map(Path.exists, map(Path, CLASSPATH.read_text(encoding="utf-8").split(":")))):
        return ""
    for program in ("java", "javac", "mvn"):
        if shutil.which(program) is None:
            return f"there is no {program} here (Debian, Ubuntu: apt install default-jdk-headless maven)"
    BUILT.mkdir(parents=True, exist_ok=True)
    jars = BUILT / "jars"
    done = subprocess.run(
        [
            *("mvn", "--quiet", "--batch-mode", "--file", str(SOURCE / "pom.xml"), f"-Dbuilt={BUILT}"),
            *("compile", "dependency:build-classpath", f"-Dmdep.outputFile={jars}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        why = next((line for line in done.stdout.splitlines() if line.startswith("[ERROR]")), "no reason given")
        return f"Maven failed: {why.removeprefix('[ERROR]').strip()[:300]}"
    whole = f"{BUILT / 'classes'}:{jars.read_text(encoding='utf-8').strip()}"
    CLASSPATH.write_text(whole, encoding="utf-8")
    return ""


class Peer:
    """A cluster of BookKeeper, and its client.

    Args:
        directory: Where everything lies.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[str]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Peer:
        """Start it."""
        with ExitStack() as undo:
            undo.callback(self._stack.close)
            self._start()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._stack.close()

    def _start(self) -> None:
        (self._directory / "log4j2.xml").write_text(_LOGGING, encoding="utf-8")
        (zookeeper,) = free_ports(1)
        url = f"zk+hierarchical://127.0.0.1:{zookeeper}/ledgers"
        server = "org.apache.zookeeper.server.ZooKeeperServerMain"
        flags = ["-Xmx512m", "-Dzookeeper.admin.enableServer=false"]
        self._serve("zookeeper", flags, zookeeper, server, str(zookeeper), str(self._directory / "zookeeper"))
        made = self._java("init", ["-Xmx256m"], "Drive", "init", url)
        if made.wait(START_SECONDS):
            raise RuntimeError(f"the cluster's metadata was not made: {self._told('init')}")
        for number in range(BOOKIES):
            self._start_bookie(number, url)
        self._client = self._java("client", ["-Xmx2g"], "Drive", "serve", url, talks=True)
        self._answer()

    def _start_bookie(self, number: int, url: str) -> None:
        place = self._directory / f"bookie-{number}"
        place.mkdir()
        (port,) = free_ports(1)
        configuration = place / "bookie.conf"
        configuration.write_text(
            f"metadataServiceUri={url}\nbookiePort={port}\nadvertisedAddress=127.0.0.1\nallowLoopback=true\n"
            f"journalDirectories={place / 'journal'}\nledgerDirectories={place / 'ledgers'}\n"
            "journalFlushWhenQueueEmpty=true\n",
            encoding="utf-8",
        )
        flags = ["-Xms512m", "-Xmx1g", "-XX:MaxDirectMemorySize=2g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=10"]
        flags.append("-Dio.netty.leakDetectionLevel=disabled")
        self._serve(f"bookie-{number}", flags, port, "org.apache.bookkeeper.server.Main", "--conf", str(configuration))

    def _java(self, name: str, flags: Sequence[str], *command: str, talks: bool = False) -> subprocess.Popen[str]:
        """Start a process whose errors, and unless it ``talks`` whose output, go to a file of its name."""
        logging = f"-Dlog4j2.configurationFile={self._directory / 'log4j2.xml'}"
        with (self._directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                ["java", *flags, logging, "-cp", CLASSPATH.read_text(encoding="utf-8"), *command],
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talks else log,
                stderr=log,
                text=True,
            )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        self._processes.append(process)
        return process

    def _serve(self, name: str, flags: Sequence[str], port: int, *command: str) -> None:
        """Start a server, and wait until it can be reached."""
        process = self._java(name, flags, *command)
        end = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.1)
        raise RuntimeError(f"{name} did not start: {self._told(name)}")

    def _told(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-2000:]

    def _answer(self) -> tuple[float, int]:
        assert self._client.stdout is not None
        line = self._client.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended with exit code {self._client.wait()}: {self._told('client')}")
        figure, entries = line.split()
        return (0.0 if figure == "ready" else float(figure)), int(entries)

    def do(self, told: str) -> tuple[float, int]:
        """Let the client work; return its figure, and the entries that it took (see ``Drive.java``)."""
        assert self._client.stdin is not None
        self._client.stdin.write(told + "\n")
        self._client.stdin.flush()
        return self._answer()

    def cpu_seconds(self) -> float:
        """Return the CPU time that all of its processes have used so far, ZooKeeper included."""
        return sum(process_cpu_seconds(process.pid) for process in self._processes if process.poll() is None)


def figure(told: str, peer: Peer, seconds: float) -> float:
    """Let the client work for some seconds; return its figure."""
    return peer.do(f"{told} {seconds}")[0]


def cpu_per_100k(told: str, peer: Peer, seconds: float) -> float:
    """Let the client work; return CPU seconds of all processes per 100 000 entries."""
    before = peer.cpu_seconds()
    entries = peer.do(f"{told} {seconds}")[1]
    return (peer.cpu_seconds() - before) / entries * 100_000


@contextmanager
def running(drive: Callable[[Peer, float], float], filled: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """A new cluster that is warm.

    Args:
        drive: Works for some seconds; returns the figure.
        filled: Write a ledger of ``scale.entries`` first, to be read.
        directory: Where everything lies.
        scale: How much is done.
    """
    with Peer(directory) as peer:
        if filled:
            peer.do(f"fill {scale.entries}")
        for _ in range(WARM_TURNS):
            drive(peer, scale.seconds)
        yield lambda seconds: drive(peer, seconds)
