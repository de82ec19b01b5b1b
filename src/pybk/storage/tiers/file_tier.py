"""Reading records that lie at an offset in a file of their tier, through a map of the file."""

from __future__ import annotations

from pybk.deferral import np
from pybk.storage.batches import span, spans
from pybk.storage.format.cold_segment import decompress
from pybk.storage.format.record import LOCATION_COMPRESSED, RECORD_HEADER_BYTES, RunLocations
from pybk.storage.io.mapped_memory import CHUNK_BYTES, Mapped
from pybk.storage.tiers.tier import (
    Loaded,
    LocationWords,
    ReadStore,
    Run,
    Tier,
    TierFiles,
    TierVolumes,
    checked_record,
)


class FileTier(Tier):
    """A tier whose records lie at ``RunLocation.offset`` in a file, as log files and cold segments have them."""

    def load(
        self,
        store: ReadStore,
        ledger_id: int,
        runs: RunLocations,
        *,
        direct: bool = False,
        check: bool = False,
        bytes_max: int = 1 << 62,
    ) -> Loaded:
        """Return the map of the file, or a copy of the part of it that has the records; unpack compressed records."""
        file_id = int(runs["file"][0])
        volumes = store.volumes
        base = 0
        if direct:
            base, end = span(runs)
            buffer = volumes.read_direct(file_id, base, end)
        elif store.fs.populates and not volumes.is_reused(file_id):
            mapped = volumes.mapped(file_id)
            buffer = mapped.view
            _populate(volumes, mapped, runs)
        else:
            base, end = span(runs)
            buffer = volumes.read(file_id, base, end)
        if (runs["flags"] & LOCATION_COMPRESSED).any():
            return _unpacked(volumes.root, ledger_id, runs, buffer, base, bytes_max)
        starts = runs["offset"].astype(np.int64) - base
        if check:
            for start, run in zip(starts.tolist(), runs, strict=True):
                checked_record(buffer, start, ledger_id, int(run["first"]), file_id, volumes.root)
        return Loaded(buffer, runs, starts + RECORD_HEADER_BYTES)

    def plain_record(
        self, store: ReadStore, ledger_id: int, words: LocationWords
    ) -> tuple[memoryview, LocationWords] | None:
        """Return the map of the file."""
        try:
            if not store.fs.populates or store.volumes.is_reused(words[2] >> 32):
                return None
            return store.volumes.view(words[2] >> 32), words
        except (KeyError, FileNotFoundError):
            return None

    def stored_record(self, files: TierFiles, ledger_id: int, run: Run) -> tuple[memoryview, int]:
        """Return the map of the file, the record populated."""
        _, _, _, offset, file_id, body_bytes, _ = run
        data = files.volumes.view(file_id)
        files.volumes.populate(data, offset, offset + RECORD_HEADER_BYTES + body_bytes)
        return data, offset


def _populate(volumes: TierVolumes, mapped: Mapped, runs: RunLocations) -> None:
    """Bring some records of a mapped file into memory, and few other bytes; raises as ``Volumes.populate``."""
    start, stop = span(runs)
    if stop - start <= CHUNK_BYTES:
        volumes.populate(mapped.view, start, stop)
    elif stop - start <= CHUNK_BYTES * len(runs):
        volumes.populate_once(mapped, start, stop)
    elif not mapped.is_populated(start, stop):
        for low, high in spans(runs):
            volumes.populate_once(mapped, low, high)


def _unpacked(root: str, ledger_id: int, runs: RunLocations, buffer: memoryview, base: int, bytes_max: int) -> Loaded:
    """Unpack records one after the other; the runs then carry the sizes of the plain bodies."""
    bodies: list[bytes | memoryview] = []
    left = bytes_max
    for run in runs:
        if bodies and left <= 0:
            break
        start = int(run["offset"]) - base
        header, body = checked_record(buffer, start, ledger_id, int(run["first"]), int(run["file"]), root)
        bodies.append(decompress(header, body))
        left -= len(bodies[-1])
    sizes = np.array([len(body) for body in bodies], np.int64)
    plain = runs[: len(bodies)].copy()
    plain["body"] = sizes
    return Loaded(memoryview(b"".join(bodies)), plain, np.cumsum(sizes) - sizes)
