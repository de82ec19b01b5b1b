"""Consumers of a shared subscription in other processes of the same machine.

A subscription has one owner, which keeps its cursor. The owner serves consumers in other processes over a Unix domain
socket, which only its user can connect to. A connection is one consumer: requests and responses take turns on it. When
it ends, the owner hands out to others the records that the consumer had not acknowledged. A connection also ends when
its process dies in any way. That is why it is a socket of the operating system and not a message queue: the kernel
reports the end of a process at once, without heartbeats. A forked child closes its copies of sockets at once, because
they would hide the end of its parent.

**Frames.** A request or a response is the length of its header and that of its data, 4 bytes each, little-endian; the
header, which is JSON; and the data: that of the records, one after the other. A request has no data.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from pybk import errors
from pybk.errors import (
    ClosedError,
    CorruptError,
    IllegalOperationError,
    PybkError,
    TooManyRequestsError,
    UsageError,
)
from pybk.manager.append_future import duration_of, seconds_of
from pybk.manager.handle import Handle, fork_error, opening_form
from pybk.streams.format import Position
from pybk.streams.log_record import LogRecord, RecordSource
from pybk.streams.subscription import (
    Acked,
    Subscription,
    SubscriptionMode,
    Taken,
    give_back_async,
    ranges_of_acked,
    redeliveries_async,
    seq_of_acked,
    still_held,
    taken_async,
)
from pybk.threads import in_children
from pybk.threads.call_threads import asyncio_form
from pybk.threads.interrupts import SLICE_SECONDS, acquire, checkpoint, guarded, is_guarded
from pybk.values import decode_json, encode_json, from_base64, to_base64

T = TypeVar("T")

_LENGTHS: Final = struct.Struct("<II")
_HEADER_BYTES_MAX: Final = 64 << 20
_REQUEST_BYTES_MAX: Final = 4 << 20
_PATH_BYTES_MAX: Final = 100
MOST_RECORDS: Final = 1000
"""Records in one response."""

HELD_MAX: Final = 10_000
"""The number of held records from which on records that others have acknowledged are forgotten."""

GRACE_SECONDS: Final = 10.0
"""Seconds after its timeout after which a ``read`` concludes that the process that serves it is stopped.

A look at bookies that hang takes up to 6 of them.
"""

ANSWER_SECONDS: Final = 60.0
"""Seconds after which any other call concludes that the process that serves it is stopped."""

_PATIENCE_MAX: Final = 1e6
"""Seconds of a timeout beyond which there is no such limit."""

_CONNECT_SECONDS: Final = 0.05


def _frame(header: Mapping[str, Any], data: bytes = b"") -> bytes:
    encoded = encode_json(dict(header))
    return b"".join((_LENGTHS.pack(len(encoded), len(data)), encoded, data))


def _lengths(prefix: bytes, header_max: int = _HEADER_BYTES_MAX) -> tuple[int, int]:
    header_bytes, data_bytes = _LENGTHS.unpack(prefix)
    if header_bytes > header_max:
        raise CorruptError(f"a frame has a header of {header_bytes} bytes; it takes at most {header_max}")
    return header_bytes, data_bytes


def _header_of(data: bytes) -> dict[str, Any]:
    return decode_json(data, dict, where="a frame of a consumer")


def _described(record: LogRecord) -> list[Any]:
    """Return everything of a record but its data."""
    key = None if record.key is None else to_base64(record.key)
    headers = [[name, to_base64(value)] for name, value in record.headers]
    return [list(record.position), len(record.data), record.time_ns, record.txid, key, headers]


def _records_of(described: Iterable[list[Any]], data: bytes) -> list[LogRecord]:
    """Return the records of a response."""
    found, at = [], 0
    for position, size, time_ns, txid, key, headers in described:
        pairs = tuple((name, from_base64(value)) for name, value in headers)
        found.append(
            LogRecord(
                Position(*position),
                data[at : at + size],
                time_ns,
                txid,
                None if key is None else from_base64(key),
                pairs,
            )
        )
        at += size
    return found


class ConsumerServer(Handle):
    """Serves a shared subscription to consumers in other processes, by a thread of its own.

    Example, in the process that has the subscription::

        with log.subscribe("billing", mode="shared") as subscription, ConsumerServer(subscription, "data/billing.sock"):
            ...

    Consumers of this process may read the subscription meanwhile. In a forked child there is no server, and ``close``
    does nothing.

    Args:
        subscription: The subscription, which is not closed with the server.
        path: The path where the socket is created, readable and writable by this user alone; at most 100 bytes. A
            socket that a process left behind is replaced.

    Raises:
        IllegalOperationError: The subscription is exclusive, or a live server has the path.
        UsageError: The path is too long, or names a file that is not a socket.

    Threads: any.
    """

    def __init__(self, subscription: Subscription, path: str | os.PathLike[str]) -> None:
        if subscription.mode is not SubscriptionMode.SHARED:
            raise IllegalOperationError(f"{subscription!r} is exclusive; subscribe with mode='shared'")
        self.path: Final = os.fspath(path)
        self._subscription = subscription
        self._listener = _listening(self.path)
        self._identity = _identity_of(self.path)
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._connections: set[asyncio.Task[None]] = set()
        self._descriptors: set[int] = set()
        """The sockets of connections."""
        in_children(self, ConsumerServer._disable)
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="pybk-consumers", daemon=True)
        self._thread.start()
        ready.result()

    def _disable(self) -> None:
        """Let go of the connections in a forked child, where they would hide the end of the parent."""
        self._closed = True
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._descriptors:
            os.dup2(null, descriptor, inheritable=False)  # not closed, because its owner would close it once more
        os.close(null)

    def close(self) -> None:
        """End all connections; records that their consumers had not acknowledged are handed out to others."""
        if not self._closed and self._loop is not None and self._stop is not None:
            self._closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            with suppress(FileNotFoundError):
                if _identity_of(self.path) == self._identity:  # else it is somebody else's by now
                    os.unlink(self.path)

    def _run(self, ready: Future[None]) -> None:
        asyncio.run(self._serve(ready))

    async def _serve(self, ready: Future[None]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_unix_server(self._connected, sock=self._listener)
        ready.set_result(None)
        await self._stop.wait()
        server.close()
        for each in list(self._connections):
            each.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one consumer until its connection ends."""
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        descriptor = writer.get_extra_info("socket").fileno()
        self._descriptors.add(descriptor)
        held = Held(self._subscription)
        try:
            while True:
                header = await _received(reader)
                writer.write(await self._answered(header, reader, held))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, CorruptError, asyncio.CancelledError):
            pass  # the consumer is gone, sent something else, or the server ends
        finally:
            self._connections.discard(task)
            self._descriptors.discard(descriptor)
            writer.close()
            if held.seqs:
                with suppress(ClosedError):
                    await give_back_async(self._subscription, held.seqs.items())

    async def _answered(self, header: Mapping[str, Any], reader: asyncio.StreamReader, held: Held) -> bytes:
        """Return the response to a request; ConnectionError if the consumer leaves meanwhile."""
        try:
            match header.get("call"):
                case "read":
                    taken = await self._read(reader, int(header["most"]), header["timeout"])
                    await held.add(taken)
                    records = taken.records
                    return _frame(
                        {"records": [_described(each) for each in records]}, b"".join(r.data for r in records)
                    )
                case "ack":
                    ranges = [range(first, end) for first, end in header["ranges"]]
                    await self._subscription.ack_coro(ranges, properties=header["properties"])
                    held.discard(ranges)
                    return _frame({})
                case "nack":
                    ranges = [range(first, end) for first, end in header["ranges"]]
                    count = await give_back_async(self._subscription, held.within(ranges), delay=header["delay"])
                    held.discard(ranges)
                    return _frame({"count": count})
                case "redeliveries":
                    return _frame({"count": await redeliveries_async(self._subscription, header["seq"])})
        except PybkError as error:
            return _frame(
                {"error": type(error).__name__, "message": str(error), "outcome_unknown": error.outcome_unknown}
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptError(f"a request of a consumer cannot be read: {error!r}") from error
        raise CorruptError(f"a consumer asks for {header.get('call')!r:.50}, which this pybk does not know")

    async def _read(self, reader: asyncio.StreamReader, most: int, timeout: float | None) -> Taken:
        """Read for a consumer; ConnectionError, with nothing handed out, if it leaves while it waits."""
        reading = asyncio.ensure_future(taken_async(self._subscription, min(most, MOST_RECORDS), timeout))
        leaving = asyncio.ensure_future(reader.read(1))  # nothing is sent before the response, so this is the end
        handed = False
        try:
            await asyncio.wait((reading, leaving), return_when=asyncio.FIRST_COMPLETED)
            handed = reading.done()
        finally:
            leaving.cancel()
            try:
                await asyncio.wait((leaving,))  # only one at a time may read
            finally:
                if not handed:
                    reading.cancel()
                    with suppress(asyncio.CancelledError, PybkError):
                        await give_back_async(self._subscription, (await reading).held)  # it may have ended meanwhile
        if not handed:
            raise ConnectionError("the consumer left")
        return reading.result()


class Held:
    """The records that a consumer was handed and has not acknowledged.

    Args:
        subscription: The subscription that handed them out.

    Attributes:
        seqs: Sequence numbers, each with the number of its delivery. They may include records that others have
            acknowledged, or were handed, since.
    """

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._most = HELD_MAX
        self.seqs: dict[int, int] = {}

    async def add(self, taken: Taken) -> None:
        """Add records that are handed out; if there are many, forget those that others acknowledged or were handed."""
        self.seqs.update(taken.held)
        if len(self.seqs) > self._most:
            self.seqs = await still_held(self._subscription, self.seqs)
            self._most = max(HELD_MAX, 2 * len(self.seqs))

    def within(self, ranges: list[range]) -> list[tuple[int, int]]:
        """Return the held records in ranges; the cost is bounded by the number of either, as ranges may be long."""
        found: list[tuple[int, int]] = []
        for each in ranges:
            seqs = each if len(each) <= len(self.seqs) else [seq for seq in self.seqs if seq in each]
            found += [(seq, self.seqs[seq]) for seq in seqs if seq in self.seqs]
        return found

    def discard(self, ranges: list[range]) -> None:
        """Forget the records in ranges."""
        for seq, _ in self.within(ranges):
            del self.seqs[seq]


async def _received(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the header of a request."""
    header_bytes, data_bytes = _lengths(await reader.readexactly(_LENGTHS.size), _REQUEST_BYTES_MAX)
    if data_bytes:
        raise CorruptError(f"a request has {data_bytes} bytes of data; it takes none")
    return _header_of(await reader.readexactly(header_bytes))


def _listening(path: str) -> socket.socket:
    """Return a socket at a path that only this user can connect to."""
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise UsageError(f"the path {path!r} of a socket takes at most {_PATH_BYTES_MAX} bytes; choose a shorter one")
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"{path!r} is not a socket; choose another path, or remove it")
        if _answers(path):
            raise IllegalOperationError(f"{path!r} is served already; close that server, or choose another path")
        os.unlink(path)
    listener = _socket()
    try:
        listener.bind(path)
        os.chmod(path, 0o600)  # before it listens, so that no other user ever connects
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _socket() -> socket.socket:
    """Return a socket, which forked children close."""
    made = socket.socket(socket.AF_UNIX)
    in_children(made, socket.socket.close)
    return made


def _answers(path: str) -> bool:
    """Return whether a live process listens to a socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(path)
        except BlockingIOError:  # it has many connections to accept
            return True
        except OSError:
            return False
    return True


def _identity_of(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


class RemoteConsumer(RecordSource):
    """A consumer of a shared subscription that another process of this machine serves; see ``ConsumerServer``.

    Example::

        with RemoteConsumer.connect("data/billing.sock") as consumer:
            for record in consumer:
                bill(record.data)
                consumer.ack(record)

    Records that it was handed and has not acknowledged are handed out to others when it is closed, or its process ends.
    In a forked child every call raises ForkedProcessError, and ``close`` does nothing.

    Threads: one call at a time; others wait, at most as long as for a response. ``close`` from any.
    """

    def __init__(self, path: str, connection: socket.socket) -> None:
        """Use ``RemoteConsumer.connect`` instead."""
        self.path: Final = path
        self._socket = connection
        self._lock = threading.Lock()
        self._closed = self._forked = False
        in_children(self, RemoteConsumer._disable)

    @classmethod
    def connect(cls, path: str | os.PathLike[str], *, wait: float = 0.0) -> RemoteConsumer:
        """Connect to the server of a subscription.

        Args:
            path: The path of the server's socket.
            wait: Seconds to wait until a server serves there.

        Raises:
            ClosedError: No server serves there.
            UsageError: ``wait`` is no number of seconds.
        """
        name, deadline = os.fspath(path), time.monotonic() + duration_of(wait, "wait")
        while True:
            connection = _socket()
            try:
                connection.connect(name)
            except OSError as error:
                connection.close()
                if time.monotonic() >= deadline:
                    raise ClosedError(f"no subscription is served at {name!r:.150}: {error.strerror}") from error
                time.sleep(_CONNECT_SECONDS)
            else:
                return cls(name, connection)

    connect_async = classmethod(opening_form(connect))

    def _disable(self) -> None:
        """Refuse calls in a forked child; its copy of the socket is closed."""
        self._forked = True

    def close(self) -> None:
        """End the connection; a call that waits raises ClosedError."""
        if self._forked:
            return
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __repr__(self) -> str:
        """Name the socket."""
        return f"<RemoteConsumer at {self.path!r}{', closed' if self._closed else ''}>"

    # ---- calls ---------------------------------------------------------------------------------------------------

    def read_many(self, most: int, timeout: float | None = None) -> list[LogRecord]:
        """Return records as ``Subscription.read_many`` does, but at most 1000.

        Raises:
            ClosedError: The server has ended, or this was closed. It is also raised, and this consumer closed, if there
                is no response 10 seconds after the timeout, because the process that serves it is stopped.
            TooManyRequestsError: A call of another thread has not ended in that time; nothing was done.
            PybkError: As ``Subscription.read_many``.
        """
        patience = seconds_of(timeout)
        if patience is not None:
            patience = max(patience, 0.0) + GRACE_SECONDS
        header, data = self._called({"call": "read", "most": most, "timeout": timeout}, patience)
        return _records_of(header["records"], data)

    def ack(self, records: Acked | Iterable[Acked], *, properties: Mapping[str, int | str] | None = None) -> None:
        """Acknowledge records as ``Subscription.ack`` does: durable on return.

        Raises:
            ClosedError: The server has ended, or this was closed. ``outcome_unknown`` is set. It is also raised, and
                this consumer closed, if there is no response within 60 seconds, because the process that serves it is
                stopped.
            TooManyRequestsError: A call of another thread, such as a ``read``, has not ended within 60 seconds; nothing
                was done.
            PybkError: As ``Subscription.ack``.
        """
        changes = None if properties is None else dict(properties)
        self._called({"call": "ack", "ranges": ranges_of_acked(records), "properties": changes}, ANSWER_SECONDS)

    ack_async = asyncio_form(ack, own_thread=True)

    def nack(self, records: Acked | Iterable[Acked], *, delay: float = 0.0) -> int:
        """Hand out again those of some records that this consumer holds, as ``Subscription.nack`` does.

        A record that timed out and was handed to another consumer is not held any more.
        """
        header, _ = self._called({"call": "nack", "ranges": ranges_of_acked(records), "delay": delay}, ANSWER_SECONDS)
        return int(header["count"])

    nack_async = asyncio_form(nack, own_thread=True)

    def redeliveries(self, record: Acked) -> int:
        """Return the number of times that a record was handed out again since its owner opened the subscription."""
        header, _ = self._called({"call": "redeliveries", "seq": seq_of_acked(record)}, ANSWER_SECONDS)
        return int(header["count"])

    def _called(self, request: Mapping[str, Any], patience: float | None = None) -> tuple[dict[str, Any], bytes]:
        """Send a request, and return the response; raises the error that it names.

        Args:
            request: Its header.
            patience: Seconds to wait for the response; None for as long as it takes.
        """
        if self._forked:
            raise fork_error(f"the consumer at {self.path!r}")
        frame = _frame(request)
        if len(frame) > _REQUEST_BYTES_MAX:
            raise UsageError(
                f"the request has {len(frame)} bytes; it takes at most {_REQUEST_BYTES_MAX}: name fewer records at once"
            )
        limit = patience if patience is not None and patience < _PATIENCE_MAX else math.inf
        header, data = guarded(self._exchanged_in_turn, frame, limit)
        if "error" in header:
            kind = getattr(errors, header["error"], None)
            if not (isinstance(kind, type) and issubclass(kind, PybkError)):
                kind = PybkError
            raise kind(header["message"], outcome_unknown=header["outcome_unknown"])
        return header, data

    def _exchanged_in_turn(self, frame: bytes, limit: float) -> tuple[dict[str, Any], bytes]:
        """Send a request, and return the response, after the calls of other threads; in a guard."""
        if not acquire(self._lock, limit):
            raise TooManyRequestsError(
                f"another call of the consumer at {self.path!r} has not ended for {limit:.3g} seconds; nothing was "
                "done: read with a timeout, or connect a consumer for each thread"
            )
        try:
            return self._exchanged(frame, limit)
        finally:
            self._lock.release()

    def _exchanged(self, frame: bytes, limit: float) -> tuple[dict[str, Any], bytes]:
        """Send a request, and return the response; the caller holds the lock."""
        try:
            deadline = time.monotonic() + limit
            self._send(frame, deadline)
            header_bytes, data_bytes = _lengths(self._exactly(_LENGTHS.size, deadline))
            header = _header_of(self._exactly(header_bytes, deadline))
            return header, self._exactly(data_bytes, deadline)
        except TimeoutError as error:
            self.close()  # the response may come yet, and would be taken for that of the next request
            raise ClosedError(
                f"the process that serves {self.path!r} did not answer within {limit:.3g} seconds; "
                "resume it if it is stopped, and connect again",
                outcome_unknown=True,
            ) from error
        except OSError as error:
            self.close()
            raise ClosedError(
                f"the subscription served at {self.path!r} was closed: {error}; connect again", outcome_unknown=True
            ) from error
        except BaseException:
            self.close()  # the response would be taken for that of the next request
            raise

    def _send(self, frame: bytes, deadline: float) -> None:
        """Send a request; TimeoutError if the server does not take it in time."""
        left = memoryview(frame)
        while left:
            left = left[self._in_time(partial(self._socket.send, left), deadline) :]

    def _in_time(self, call: Callable[[], T], deadline: float) -> T:
        """Return the result of a call of the socket, with checkpoints meanwhile; TimeoutError after the deadline."""
        most = SLICE_SECONDS if is_guarded() else _PATIENCE_MAX
        while True:
            left = deadline - time.monotonic()
            self._socket.settimeout(max(min(left, most), 0.001))
            try:
                return call()
            except TimeoutError:
                if left <= most:
                    raise
            checkpoint()

    def _exactly(self, nbytes: int, deadline: float) -> bytes:
        """Return so many bytes of the response; TimeoutError if they do not come in time."""
        found = bytearray()
        while len(found) < nbytes:
            piece = self._in_time(partial(self._socket.recv, min(nbytes - len(found), 1 << 20)), deadline)
            if not piece:
                raise ConnectionError("the connection has ended")
            found += piece
        return bytes(found)
