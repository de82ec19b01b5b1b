"""The files of a store: their tiers, the directories in which they lie, and their open maps.

A file id is used once and never again. The tier of a file's kind names it in its directory. A further tier is a
module that implements ``Tier``, and an entry of ``TIERS``.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_hexdigest

from pybk.errors import CookieError, CorruptError, PybkError, StorageError, UnsupportedFormatError, UsageError
from pybk.flags import StorageHint
from pybk.storage.format.cookie import read_cookie
from pybk.storage.format.index_rows import FileRow
from pybk.storage.format.log_file import RESERVED_FILE_BYTES
from pybk.storage.io.failures import is_passing, refused
from pybk.storage.io.filesystem import CHUNK_BYTES, FileSystem, Mapped, populate, replace_file, unreadable
from pybk.storage.tiers import LOG, Tier
from pybk.storage.tiers.file_tier import ColdTier, LogTier
from pybk.storage.tiers.lmdb_tier import LmdbTier

_DIRECTORIES_FORMAT: Final = 1
_CHECKED_BYTES_MAX: Final = 1 << 20
"""The most bytes that are read of a file of JSON with a checksum; none is so long."""


TIERS: Final[tuple[Tier, ...]] = (LogTier(), LmdbTier(), ColdTier())
"""All tiers; if two take one hint, the last of them gets its entries."""


def tiers_by_kind() -> dict[str, Tier]:
    """Return all tiers by the kind of their files; callers keep it, because a call would make each read slower."""
    return {tier.kind: tier for tier in reversed(TIERS)}


def tier_of_kind(kind: str) -> Tier:
    """Return the tier that keeps files of a kind; KeyError if there is none."""
    for tier in TIERS:
        if tier.kind == kind:
            return tier
    raise KeyError(kind)


def tier_for(hint: StorageHint) -> Tier:
    """Return the tier that moved entries with a storage hint are written to; KeyError if there is none."""
    for tier in reversed(TIERS):
        if hint in tier.hints:
            return tier
    raise KeyError(hint)


class Directory(NamedTuple):
    """One directory of one tier."""

    tier: StorageHint
    number: int
    path: str


def plan_directories(root: str, tiers: Mapping[StorageHint, str | Sequence[str]] | None) -> list[Directory]:
    """Return the tier directories, in order of tier and number; tiers not named lie in sub-folders of ``root``.

    Raises:
        UsageError: A key is not a StorageHint, a list is empty, or a path is named twice.
    """
    given = named_paths(tiers or {})
    paths = {tier: given.get(tier, [os.path.join(root, tier.value)]) for tier in StorageHint}
    check_distinct(root, paths)
    return [Directory(tier, number, os.path.abspath(path)) for tier in paths for number, path in enumerate(paths[tier])]


def check_distinct(root: str | None, tiers: Mapping[StorageHint, Sequence[str]]) -> None:
    """Check that no directory is named twice.

    Args:
        root: The store's own directory; None if it is not known yet.
        tiers: The directories of tiers.

    Raises:
        UsageError: One of them is named twice, or is the store's own.
    """
    seen = set() if root is None else {os.path.abspath(root)}
    for tier, paths in tiers.items():
        for path in map(os.path.abspath, paths):
            if path in seen:
                raise UsageError(
                    f"tiers[{tier}] names {path}, which is named before, or is the store's own directory; name another "
                    "one, because each stands for itself"
                )
            seen.add(path)


def named_paths(tiers: Mapping[StorageHint, str | Sequence[str]]) -> dict[StorageHint, list[str]]:
    """Return the paths that are named for each tier.

    Raises:
        UsageError: A key is not a StorageHint, a list is empty, or a value is not a path.
    """
    if not isinstance(tiers, Mapping):
        raise UsageError(f"tiers is {tiers!r:.100}; it takes a mapping: {{StorageHint.HDD: '/mnt/hdd/pybk'}}")
    given = {}
    for tier, value in tiers.items():
        if not isinstance(tier, StorageHint):
            raise UsageError(
                f"tiers has the key {tier!r:.100}; keys are StorageHint.NVME, StorageHint.SSD, StorageHint.HDD"
            )
        paths: object = [value] if isinstance(value, (str, os.PathLike)) else value
        if not isinstance(paths, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in paths):
            raise UsageError(f"tiers[{tier}] is {value!r:.100}; it takes a str, a path, or a list of them")
        if not paths:
            raise UsageError(f"tiers[{tier}] is empty; name at least one directory")
        given[tier] = [os.fsdecode(path) for path in paths]
        if any("\0" in path for path in given[tier]):
            raise UsageError(f"tiers[{tier}] is {value!r:.100}; no path holds a NUL character")
    return given


def save_directories(fs: FileSystem, root: str, directories: Sequence[Directory]) -> None:
    """Remember the tier directories in the main directory; later opens need not name them."""
    rows = [[d.tier.value, d.number, _relative(root, d.path)] for d in directories]
    save_checked(fs, os.path.join(root, "directories"), {"directories": rows, "format": _DIRECTORIES_FORMAT})


def load_directories(fs: FileSystem, root: str) -> list[Directory]:
    """Return the remembered tier directories.

    Raises:
        CorruptError: The list is damaged or missing.
    """
    path = os.path.join(root, "directories")
    if not fs.exists(path):
        raise CorruptError(f"{path} is missing; {_how_to_list(fs, root)}", path=path)
    content = load_checked(fs, path)
    if content is None:
        raise CorruptError(f"{path} is damaged; {_how_to_list(fs, root)}", path=path)
    if content["format"] != _DIRECTORIES_FORMAT:
        raise UnsupportedFormatError(f"{path} has format {content['format']}; this pybk reads {_DIRECTORIES_FORMAT}")
    return [
        Directory(StorageHint(tier), number, os.path.normpath(os.path.join(root, where)))
        for tier, number, where in content["directories"]
    ]


def save_checked(fs: FileSystem, path: str, values: Mapping[str, Any]) -> None:
    """Replace a small file by values as JSON and a checksum, durably; raises as ``replace_file``."""
    body = json.dumps(values, sort_keys=True)
    replace_file(fs, path, f"{body}\n{xxh3_64_hexdigest(body.encode())}\n".encode())


def load_checked(fs: FileSystem, path: str) -> Any | None:
    """Return the values in a file that ``save_checked`` wrote; None if it is damaged. It must exist."""
    with closing(fs.open(path)) as file:
        data = file.read(0, min(file.size, _CHECKED_BYTES_MAX))
    body, _, checksum = data.decode("utf-8", "replace").partition("\n")
    return json.loads(body) if checksum == xxh3_64_hexdigest(body.encode()) + "\n" else None


def _how_to_list(fs: FileSystem, root: str) -> str:
    """Return the command that lists a store's tier directories again: those that lie in the store's own directory."""
    found: dict[StorageHint, list[tuple[int, str]]] = {tier: [] for tier in StorageHint}
    for name in fs.list_directory(root):
        path = os.path.join(root, name)
        with suppress(PybkError, OSError):
            cookie = read_cookie(fs, path)
            if cookie is not None and cookie.tier in found:
                found[StorageHint(cookie.tier)].append((cookie.directory, path))
    paths = {tier: [path for _, path in sorted(found[tier])] or [os.path.join(root, tier.value)] for tier in found}
    named = [f"{tier.value}={path}" for tier in paths for path in paths[tier]]
    options = " ".join(shlex.join(("--tier-directory", each)) for each in named)
    unknown = [tier.value for tier in found if not found[tier]]
    remark = (
        ""
        if not unknown
        else (
            f"; {root} has no directory of the tiers {', '.join(unknown)}: name them where they are, or make an empty "
            "directory there for one that is lost"
        )
    )
    return (
        f"run `pybk store rebuild-index {shlex.quote(root)} {options}`, which makes it again, with --accept-loss to "
        f"continue without the entries that it lists as missing{remark}"
    )


def _relative(root: str, path: str) -> str:
    """Keep paths below the store relative, because the whole store may be moved."""
    root = os.path.abspath(root)
    return os.path.relpath(path, root) if path.startswith(root + os.sep) else path


class Volumes:
    """Tier directories and the files in them.

    Threads: any.
    """

    def __init__(self, fs: FileSystem, root: str, directories: Sequence[Directory]) -> None:
        self.fs = fs
        self.root = root
        self.directories = list(directories)
        self.rows: dict[int, FileRow] = {}
        self._paths = {(d.tier.value, d.number): d.path for d in directories}
        self._tiers = tiers_by_kind()
        self.views: dict[int, Mapped] = {}
        """Maps of whole files."""
        self._views_max = fs.maps_max()
        self._lock = threading.Lock()
        self._next_file_id = 1
        self._turns = dict.fromkeys(StorageHint, 0)

    def tier_paths(self, tier: StorageHint) -> list[str]:
        """Return the directories of a tier, by number."""
        return [d.path for d in self.directories if d.tier is tier]

    def reserve_ids(self, next_file_id: int) -> None:
        """Use only ids from this one on for new files."""
        with self._lock:
            self._next_file_id = max(self._next_file_id, next_file_id)

    @property
    def next_file_id(self) -> int:
        """The id that the next new file will get."""
        return self._next_file_id

    def new_id(self) -> int:
        """Return a file id that was never used before."""
        with self._lock:
            file_id = self._next_file_id
            self._next_file_id += 1
        return file_id

    def new_file(self, kind: str, tier: StorageHint) -> FileRow:
        """Give a new file its id and its directory; directories of a tier take turns by free space."""
        paths = self.tier_paths(tier)
        file_id = self.new_id()
        with self._lock:
            number = self._turns[tier] % len(paths)
            self._turns[tier] += 1
        if len(paths) > 1 and self.fs.free_bytes(paths[number]) * 2 < max(map(self.fs.free_bytes, paths)):
            number = max(range(len(paths)), key=lambda n: self.fs.free_bytes(paths[n]))
        return FileRow(file_id, kind, tier.value, number, 0)

    def path_of(self, row: FileRow) -> str:
        """Return the path of a file."""
        directory = self.directory_of(row)
        return os.path.join(directory, self._tiers[row.kind].file_name(row.file_id))

    def tier_of(self, row: FileRow) -> Tier:
        """Return the tier that keeps a file.

        Raises:
            UnsupportedFormatError: A newer pybk wrote the file, in a tier that this one does not have.
        """
        try:
            return self._tiers[row.kind]
        except KeyError:
            raise UnsupportedFormatError(
                f"file {row.file_id:016x} is of kind {row.kind}; this pybk reads {', '.join(sorted(self._tiers))}; "
                "open the store with the pybk that wrote it, or newer"
            ) from None

    def by_device(self) -> dict[int, list[Directory]]:
        """Return the tier directories by the device that has them; by it a caller counts each device once."""
        found: dict[int, list[Directory]] = {}
        for directory in self.directories:
            found.setdefault(self.fs.device(directory.path), []).append(directory)
        return found

    def directory_of(self, row: FileRow) -> str:
        """Return the directory a file lies in."""
        try:
            return self._paths[row.tier, row.directory]
        except KeyError:
            raise CookieError(
                f"file {row.file_id:016x} lies in directory {row.directory} of tier {row.tier}, which is not "
                "named; open the store with tiers={...} naming every directory it was made with"
            ) from None

    def found(self, *kinds: str) -> dict[int, FileRow]:
        """Return the files that lie in the directories, by id, whether the index names them or not.

        Args:
            kinds: Kinds of files; none returns all but LMDB environments, which do not carry their ids.
        """
        rows = {}
        for directory in self.directories:
            names = self.fs.list_directory(directory.path)  # once for all tiers
            for kind in kinds or self._tiers:
                tier = self._tiers[kind]
                for file_id in tier.file_ids(directory.path, names):
                    row = FileRow(file_id, kind, directory.tier.value, directory.number, 0)
                    try:
                        rows[file_id] = row._replace(bytes=tier.file_bytes(self.fs, self.path_of(row)))
                    except FileNotFoundError:
                        continue  # removed since it was listed, by the process that writes the store
        return dict(sorted(rows.items()))

    def view(self, file_id: int) -> memoryview:
        """Return a read-only map of a whole file; it stays valid for as long as it is referenced.

        Call ``populate`` before touching a range of it.

        Raises:
            KeyError: The file is not known, or no longer; look up again where the entries lie.
            FileNotFoundError: It was just removed; look up again where the entries lie.
            StorageRefusedError: This process has no descriptor or memory left for it, although other maps were closed.
            StorageError: The operating system refuses.
        """
        return self.mapped(file_id).view

    def mapped(self, file_id: int) -> Mapped:
        """Return the map of a whole file; raises as ``view`` does."""
        mapped = self.views.get(file_id)
        if mapped is None:
            view = self._read(file_id, self.fs.view)
            populated = bytearray(-(-len(view) // CHUNK_BYTES))
            mapped = Mapped(view, self.fs.populator(view), populated, self.fs.sizer(view))
            if self.is_reused(file_id):
                return mapped
            with self._lock:
                while len(self.views) >= self._views_max:
                    del self.views[next(iter(self.views))]
                if file_id in self.rows:  # a file that was removed meanwhile must not stay mapped
                    mapped = self.views.setdefault(file_id, mapped)
        return mapped

    def is_reused(self, file_id: int) -> bool:
        """Return whether a file may have another name and other bytes later; then no map of it may be handed out.

        Raises:
            KeyError, FileNotFoundError: As ``view``.
        """
        row = self.rows[file_id]
        return (
            row.kind == LOG
            and row.directory == 0
            and file_id not in self.views
            and self.fs.file_bytes(self.path_of(row)) == RESERVED_FILE_BYTES
        )

    def populate(self, view: memoryview, start: int, stop: int) -> None:
        """Bring a range of a map that ``view`` returned into memory, so that it can be touched.

        If that fails, and another file has the name by now, such as one that was restored, the next read maps that one.

        Raises:
            CorruptError: The file was cut.
            StorageError: The device cannot read it.
        """
        try:
            populate(self.fs, view, start, stop)
        except StorageError:
            self._let_go_of_replaced(view)
            raise

    def _let_go_of_replaced(self, view: memoryview) -> None:
        """Let go of a map of a file if the one that has its name now is of another size."""
        with self._lock:
            for file_id in [file_id for file_id, mapped in self.views.items() if mapped.view is view]:
                with suppress(KeyError, OSError):
                    row = self.rows[file_id]
                    size = self._tiers[row.kind].file_bytes(self.fs, self.path_of(row))
                    if size != self.views[file_id].file_bytes():
                        del self.views[file_id]

    def populate_once(self, mapped: Mapped, start: int, stop: int) -> None:
        """Bring a range of a file's map into memory, unless that was done before and the file was not cut since.

        For ranges of many pages, where asking the kernel costs more than looking at the file's size. What was populated
        and dropped from memory is read again when it is touched.

        Raises:
            CorruptError, StorageError: As ``populate``.
        """
        if mapped.is_populated(start, stop):
            return
        low, high = start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)
        try:
            populate(self.fs, mapped.view, low * CHUNK_BYTES, high * CHUNK_BYTES)
        except StorageError:
            self.populate(mapped.view, start, stop)  # the chunks may be cut or unreadable outside of the range
        else:
            mapped.populated[low:high] = b"\1" * len(mapped.populated[low:high])

    def unreadable(self, view: memoryview, stop: int, error: OSError) -> StorageError:
        """Return the error to raise when ``FileSystem.populate`` refused a range of a map."""
        return unreadable(self.fs, view, stop, error)

    def read(self, file_id: int, start: int, end: int) -> memoryview:
        """Read bytes of a file into private memory, through the page cache; raises as ``view`` does."""

        def read(path: str) -> memoryview:
            with closing(self.fs.open(path)) as file:
                data = memoryview(file.read(start, min(end, file.size) - start))
            return self._while_named(path, data)

        return self._read(file_id, read)

    def read_direct(self, file_id: int, start: int, end: int) -> memoryview:
        """Read bytes of a file into private memory, past the page cache; raises as ``view`` does."""
        return self._read(file_id, lambda path: self._while_named(path, self.fs.read_direct(path, start, end - start)))

    def _while_named(self, path: str, data: memoryview) -> memoryview:
        """Return bytes that were read; FileNotFoundError if the file lost its name meanwhile, and maybe its bytes."""
        if not self.fs.exists(path):
            raise FileNotFoundError(errno.ENOENT, "removed while it was read", path)
        return data

    def _read(self, file_id: int, read: Callable[[str], memoryview]) -> memoryview:
        path = self.path_of(self.rows[file_id])
        try:
            try:
                return read(path)
            except OSError as error:
                if not is_passing(error) or not self.views:
                    raise
                self.close()  # each map takes a descriptor
                return read(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            if is_passing(error):
                raise refused(error, f"reading {path}") from error
            raise StorageError(
                f"{path} cannot be read: {error}; try again, and if that fails too, restore the file from a backup"
            ) from error

    def add(self, row: FileRow) -> None:
        """Make a file known."""
        with self._lock:
            self.rows[row.file_id] = row

    def forget(self, file_id: int) -> None:
        """Let go of a file that another process unlinked; maps of it that are in use stay valid."""
        with self._lock:
            self.rows.pop(file_id, None)
            self.views.pop(file_id, None)

    def let_go(self, file_id: int) -> None:
        """Forget the map of a file; the next read maps it as it is then, for example restored."""
        with self._lock:
            self.views.pop(file_id, None)

    def drop(self, file_id: int) -> None:
        """Unlink a file; maps of it that are in use stay valid."""
        with self._lock:
            row = self.rows.pop(file_id, None)
            self.views.pop(file_id, None)
        if row is not None:
            self.unlink(row)

    def unlink(self, row: FileRow) -> None:
        """Remove a file that the volumes do not know, or know no longer."""
        self._tiers[row.kind].unlink(self.fs, self.path_of(row))

    def exists(self, row: FileRow) -> bool:
        """Return whether a file exists; an LMDB environment that a salvage made in place of a lost one does not."""
        return self._tiers[row.kind].exists(self.fs, self.path_of(row))

    def close(self) -> None:
        """Let go of all maps, each with its file descriptor; those in use stay valid until they are not."""
        with self._lock:
            self.views.clear()

    def after_fork(self) -> None:
        """Let go of all maps in a forked child, where they would keep files that the parent unlinks."""
        self._lock = threading.Lock()
        self.views = {}

    def disk_bytes(self) -> int:
        """Return the bytes that files take on the store's devices, LMDB environments left out."""
        with self._lock:
            rows = list(self.rows.values())
        return sum(self._tiers[row.kind].disk_bytes(self.fs, self.path_of(row)) for row in rows)
