"""A proxy between a client and a bookie that may hold back, delay, damage or cut what passes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_CHUNK_BYTES = 1 << 16


class Direction:
    """One way through a proxy.

    Attributes:
        is_open: Nothing passes while it is not set; what was sent stays on the way.
        delay_s: Seconds that everything takes longer.
        change: Changes what passes, piece by piece; None changes nothing.
        passed: Bytes that passed so far.
    """

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.delay_s = 0.0
        self.change: Callable[[bytes], bytes] | None = None
        self.passed = 0

    def carry(self, source: socket.socket, target: socket.socket) -> None:
        """Pass on all that comes, until either end closes."""
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self.is_open.wait()
                if self.delay_s:
                    time.sleep(self.delay_s)
                if self.change is not None:
                    data = self.change(data)
                self.passed += len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A listener that passes connections on.

    Attributes:
        address: Where it listens.
        target: Where it connects to, as ``tcp://host:port``.
        requests: To the target.
        replies: From the target.
    """

    def __init__(self, target: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.target = target
        self.requests = Direction()
        self.replies = Direction()
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            host, port = self.target.removeprefix("tcp://").rsplit(":", 1)
            try:
                server = socket.create_connection((host, int(port)))
            except OSError:
                client.close()
                continue
            self._ends += [client, server]
            for way, source, target in ((self.requests, client, server), (self.replies, server, client)):
                thread = threading.Thread(target=way.carry, args=(source, target), daemon=True)
                self._threads.append(thread)
                thread.start()

    def hold(self, *, requests: bool = True, replies: bool = True) -> None:
        """Let nothing pass any more, one way or both."""
        for way, wanted in ((self.requests, requests), (self.replies, replies)):
            if wanted:
                way.is_open.clear()

    def heal(self) -> None:
        """Let everything pass as it comes."""
        for way in (self.requests, self.replies):
            way.is_open.set()
            way.delay_s = 0.0
            way.change = None

    def cut(self) -> None:
        """Break the connections that there are."""
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Break all connections and accept no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.heal()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()
