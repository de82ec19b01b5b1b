"""Passwords and secrets, given as a value, a file or an environment variable; their ``repr`` never shows them."""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import tomllib
from binascii import a2b_base64
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Final, Self

from pybk.deferral import without
from pybk.errors import UsageError
from pybk.values import flag_of, whole

PASSWORD: Final = "PYBK_PASSWORD"
"""The environment variable of a ledger's password; with ``_FILE`` appended, of the path of a file that holds it."""

SECRET: Final = "PYBK_SECRET"
"""The environment variable of a ledger's secret; with ``_FILE`` appended, of the path of a file that holds it."""

CLUSTER_SECRET: Final = "PYBK_CLUSTER_SECRET"
"""The environment variable of a cluster's secret; with ``_FILE`` appended, of the path of a file that holds it.

While the secret is replaced, the variable with ``_NEXT`` appended may hold a second one. If a file holds the secret,
the second one is in a file next to it with ``.next`` appended to its name.
"""

SECRET_BYTES_MIN: Final = 16
"""The shortest cluster secret that is accepted, in bytes; 32 random bytes are a good one."""

LEDGER_SECRET_BYTES_MIN: Final = 32
"""The shortest secret of a ledger that is accepted, in bytes, because nothing slows down guesses of it."""

_BYTES_MAX: Final = 1 << 16
_PASSWORDS_BYTES_MAX: Final = 16 << 20

_URL: Final = re.compile(r"://(?:(?:(?!://)[^\n\"\\])*@|\S*@)?[^\s\"'\\]*")
_USER: Final = re.compile(r"://.*@")
_SETTING: Final = re.compile(r"([?&;#])([^=&;#]*)(=?)[^&;#]*")

logger = logging.getLogger(__name__)


def read_secret_file(path: str | os.PathLike[str], *, private: bool = False, bytes_max: int = _BYTES_MAX) -> bytes:
    """Return the content of a file without its trailing line end.

    Args:
        path: The file.
        private: Whether a file that every user may read or change is refused.
        bytes_max: The most bytes that it may have.

    Raises:
        UsageError: It cannot be read, is too long for a secret, or is not private.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise UsageError(
            f"{path} is to hold a password or a secret, and cannot be read: {error.strerror}; name a file that this "
            "user can read"
        ) from error
    if private and mode & (stat.S_IROTH | stat.S_IWOTH):
        if stat.S_ISCHR(mode):  # one of the system, which all programs need as it is
            raise UsageError(
                f"{path} is a device that every user may read or change: name a file that holds the secret"
            )
        raise UsageError(
            f"{path} holds a secret, and its mode {stat.S_IMODE(mode):04o} lets every user of this host read or change "
            f"it: chmod 600 {path}, or 640 for the members of its group"
        )
    if len(data) > bytes_max:
        raise UsageError(f"{path} has more than {bytes_max} bytes, too many for a password or a secret")
    return data.removesuffix(b"\n").removesuffix(b"\r")


def write_new_secret(path: str) -> None:
    """Write 32 random bytes, in hexadecimal, to a new file that its owner alone may read.

    Raises:
        UsageError: The file exists, or cannot be made.
        OSError: It cannot be written; it is removed again.

    Durability: The file and its name are durable on return.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} exists, and may hold a secret that is needed: name another file") from None
    except OSError as error:
        raise UsageError(
            f"{path} cannot be made: {error.strerror}; name a file in a directory that exists, and that this user may "
            "write to"
        ) from error
    try:
        with open(file, "wb") as opened:
            opened.write(f"{secrets.token_hex(LEDGER_SECRET_BYTES_MIN)}\n".encode())
            opened.flush()
            os.fsync(file)
        _sync_directory(os.path.dirname(os.path.abspath(path)))
    except BaseException:
        os.unlink(path)  # a part of a secret would be taken for one
        raise


def _sync_directory(path: str) -> None:
    """Make the names in a directory durable: a loss of power must not take the only secret of durable ledgers."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def without_credentials(text: str, settings: Collection[str] = ()) -> str:
    """Return a URL, or a text with URLs, without users, passwords and the values of settings that may be secret.

    Everything before the last ``@`` of a URL is left out, because a password may have any character, even a blank. In a
    text a URL extends to the last ``@`` of the line, or to the next URL.

    Args:
        text: The text.
        settings: The names of settings, after ``?``, whose values are not secret.
    """

    def shown(found: re.Match[str]) -> str:
        separator, name, equals = found.group(1, 2, 3)
        if name in settings:
            return found.group()
        return f"{separator}{name}=..." if equals else f"{separator}..."

    return _URL.sub(lambda url: _SETTING.sub(shown, _USER.sub("://...@", url.group())), text)


def cut_value(value: object, most: int) -> str:
    """Return the ``repr`` of a caller's value for a message, without the credentials of a URL, and then cut.

    Args:
        value: The value, which may be a URL in a wrong place.
        most: The most characters that are shown.
    """
    shown = without_credentials(repr(value))
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def checked_password(password: object) -> bytes:
    """Return a password; raise UsageError, which does not show it, if it is not bytes."""
    if not isinstance(password, bytes):
        raise UsageError(f"a password is bytes, not {type(password).__name__}; encode text first: text.encode()")
    return password


def _file_name_of(path: object) -> str:
    """Return the path of a file that holds a secret as text."""
    if not isinstance(path, str | os.PathLike) or not isinstance(name := os.fspath(path), str) or not name:
        raise UsageError(f"file is {path!r:.100}; it takes the path of a file that holds the secret")
    return name


@without(read_next="read() returns the secret")
@dataclass(frozen=True, slots=True)
class Secret:
    """A password or secret, and its source: the first of these that is given.

    Attributes:
        value: The secret itself.
        file: The path of a file that holds it, on each machine that reads it, kept as text; a trailing line end is
            removed.
        variable: An environment variable that holds it; the variable with ``_FILE`` appended may name such a file. If
            both are set, the file is taken.
        private: Whether a file that every user of the host may read or change is refused.
    """

    value: bytes | None = field(default=None, repr=False)
    file: str | os.PathLike[str] | None = None
    variable: str | None = None
    private: bool = False

    def __post_init__(self) -> None:
        """Check the types: a number would name a file that is open, which another part of the process needs.

        Raises:
            UsageError: One of them is of another type.
        """
        if self.value is not None:
            checked_password(self.value)
        if self.file is not None:
            object.__setattr__(self, "file", _file_name_of(self.file))
        if not isinstance(self.variable, str | None):
            raise UsageError(f"variable is {self.variable!r:.100}; it takes the name of an environment variable")
        flag_of(self.private, "private")

    def read(self) -> bytes | None:
        """Return the secret, None if none was given.

        Raises:
            UsageError: The file cannot be read, is too long, or is not ``private``.
        """
        if self.value is not None:
            return self.value
        if self.file is not None:
            return read_secret_file(self.file, private=self.private)
        if self.variable is None:
            return None
        file = os.environ.get(f"{self.variable}_FILE")
        return read_secret_file(file, private=self.private) if file else os.environb.get(self.variable.encode())

    def read_all(self) -> tuple[bytes, ...]:
        """Return the secret and the secret that replaces it, as far as they are given: none, one or two.

        The second one is in the file with ``.next`` appended to its name, or in the variable with ``_NEXT`` appended.

        Raises:
            UsageError: As ``read``, or the second one is too short.
        """
        first = self.read()
        if first is None:
            return ()
        following = self._read_next()
        return (first,) if following is None else (first, following)

    def _read_next(self) -> bytes | None:
        """Return the secret that replaces a cluster's, None if none was given.

        Raises:
            UsageError: As ``read``, or it is too short, such as that in a file which is being written.
        """
        if self.value is not None or (self.file is None and self.variable is None):
            return None
        file = self.file or os.environ.get(f"{self.variable}_FILE")
        name = f"{file}.next" if file else f"{self.variable}_NEXT"
        if file:
            following = read_secret_file(name, private=self.private) if os.path.exists(name) else None
        else:
            following = os.environb.get(name.encode())
        if following is not None and len(following) < SECRET_BYTES_MIN:
            raise UsageError(
                f"{name} has {len(following)} bytes, and is to hold the next secret of a cluster, which takes at least "
                f"{SECRET_BYTES_MIN}: write it again, or remove it"
            )
        return following

    @property
    def source(self) -> str | None:
        """The place where ``read`` looks, for errors; None if it is the value itself, or nothing was given."""
        if self.value is not None or (self.file is None and self.variable is None):
            return None
        if self.file is not None:
            return f"the file {self.file}"
        file = os.environ.get(f"{self.variable}_FILE")
        if file:
            return f"the file {file}, which {self.variable}_FILE names,"
        return f"the environment variable {self.variable}"


class KeyKind(StrEnum):
    """The kind of value from which the keys of a ledger are derived."""

    PASSWORD = "password"
    """A password, which scrypt stretches, because people choose it."""

    SECRET = "secret"
    """Random bytes, which need no stretching."""

    NOTHING = "nothing"
    """No secret value: anybody can derive the keys."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The password and the secret that a caller gave; a ledger takes the kind with which it was created.

    Attributes:
        password: A password; empty for none.
        secret: A secret of at least ``LEDGER_SECRET_BYTES_MIN`` bytes; None for none.
    """

    password: bytes = field(default=b"", repr=False)
    secret: bytes | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        """Return whether a password or a secret is given."""
        return bool(self.password) or self.secret is not None

    @property
    def kind(self) -> KeyKind:
        """The kind of a ledger that is created with them; the secret has precedence over the password."""
        if self.secret is not None:
            return KeyKind.SECRET
        return KeyKind.PASSWORD if self.password else KeyKind.NOTHING

    def of(self, kind: KeyKind) -> bytes | None:
        """Return the value from which the keys of a ledger of a kind are derived; None if it was not given.

        If nothing is given, the empty password is tried on a ledger that has a password, because older ledgers without
        one have the empty password. A ledger without either opens only if nothing is given, because a caller that gives
        a secret expects authentic entries.
        """
        match kind:
            case KeyKind.SECRET:
                return self.secret
            case KeyKind.PASSWORD:
                return None if self.secret is not None and not self.password else self.password
            case KeyKind.NOTHING:
                return None if self else b""

    @property
    def value(self) -> bytes:
        """The value from which the keys of a ledger that is created with them are derived."""
        return self.password if self.secret is None else self.secret


NO_CREDENTIALS: Final = Credentials()
"""No credentials, as for a ledger that has neither password nor secret."""


@dataclass(frozen=True, slots=True)
class CredentialSources:
    """The sources of a password and a secret, which are read on each machine that needs them; it can be sent there.

    Attributes:
        password: The password, or its source; ``Secret()`` for none.
        secret: The secret, or its source; ``Secret()`` for none.
    """

    password: Secret = field(default_factory=Secret)
    secret: Secret = field(default_factory=Secret)

    @classmethod
    def of(cls, password: bytes | Secret | None, secret: bytes | Secret | None) -> Self:
        """Return the sources in the arguments ``password`` and ``secret`` of a call.

        Raises:
            UsageError: A value is not bytes, or too short for a secret.
        """
        if not isinstance(password, Secret):
            password = Secret(None if password is None else checked_password(password))
        if not isinstance(secret, Secret):
            secret = Secret(None if secret is None else checked_secret(secret))
        return cls(password, secret)

    def read(self) -> Credentials:
        """Return the password and the secret; raises as ``read_credentials``."""
        return read_credentials(self.password, None if self.secret == Secret() else self.secret)


def checked_secret(secret: object) -> bytes:
    """Return a ledger's secret.

    Raises:
        UsageError: It is not bytes, or too short; the error does not show it.
    """
    if not isinstance(secret, bytes):
        raise UsageError(
            f"a secret is bytes or a pybk.Secret, not {type(secret).__name__}; `pybk secret new FILE` makes one"
        )
    if len(secret) < LEDGER_SECRET_BYTES_MIN:
        raise UsageError(
            f"the secret has {len(secret)} bytes, and takes at least {LEDGER_SECRET_BYTES_MIN} random ones, because "
            "nothing makes guesses slow; `pybk secret new FILE` makes one; what people choose is a password"
        )
    return secret


def read_credentials(password: bytes | Secret | None, secret: bytes | Secret | None) -> Credentials:
    """Return the credentials in the arguments ``password`` and ``secret`` of a call; None stands for none.

    Raises:
        UsageError: One is of another type, the secret is too short, or a named source is empty.
    """
    word = password.read() if isinstance(password, Secret) else password
    key = secret.read() if isinstance(secret, Secret) else secret
    if isinstance(secret, Secret) and not key:
        raise UsageError(
            f"{secret.source or 'the pybk.Secret that is given'} holds no secret; `pybk secret new FILE` makes one"
        )
    return Credentials(b"" if word is None else checked_password(word), None if key is None else checked_secret(key))


def given_credentials(password: bytes | Secret, secret: bytes | Secret | None) -> Credentials:
    """Return credentials as ``read_credentials``; a password that is None is refused, because it may be a lost one."""
    if not isinstance(password, Secret):
        checked_password(password)
    return read_credentials(password, secret)


def environment_credentials(*, private: bool = False) -> Credentials:
    """Return the password and the secret in the environment, if they are set.

    Args:
        private: Whether files that every user of the host may read or change are refused.

    Raises:
        UsageError: As ``Secret.read``, or the secret is too short.
    """
    secret = Secret(variable=SECRET, private=private).read()
    password = Secret(variable=PASSWORD, private=private)
    return read_credentials(password, secret or None)


ClusterSecret = bytes | Sequence[bytes] | Secret
"""A cluster's secret: itself; it and the one that replaces it, in any order; or their source."""

SECRETS_MAX: Final = 2
"""The number of secrets that a cluster may have at once."""


def cluster_secrets(given: ClusterSecret | None) -> Callable[[], tuple[bytes, ...]] | None:
    """Return a function that reads a cluster's secrets, which may change between calls; None if none is given.

    Raises:
        UsageError: A secret is not of type bytes, or too many are given; or as ``Secret.read_all``. The returned
            function raises it as ``Secret.read`` does. If the next secret becomes unusable, it logs that, and the
            former one stays.
    """
    if isinstance(given, Secret):
        first = given.read_all()
        return partial(_read_again, given, _Following(first[1] if len(first) > 1 else None)) if first else None
    if given is None:
        return None
    each: object = (given,) if isinstance(given, bytes) else given
    if not isinstance(each, list | tuple) or not all(isinstance(one, bytes) for one in each):
        raise UsageError(f"cluster_secret takes bytes, a sequence of them, or a Secret, not {type(given).__name__}")
    if not 1 <= len(each) <= SECRETS_MAX:
        raise UsageError(f"cluster_secret has {len(each)} secrets; it takes one, or the present and the next one")
    fixed = tuple(each)
    return lambda: fixed


@dataclass(slots=True)
class _Following:
    """The next secret of a cluster as a process found it last, and the last error since then."""

    secret: bytes | None = field(default=None, repr=False)
    problem: str = ""


def _read_again(given: Secret, following: _Following) -> tuple[bytes, ...]:
    """Read a cluster's secrets again, in a process that runs.

    An operator may be writing the file of the next secret, or have made it for another user. The process must still
    continue with the present one.
    """
    present = given.read()
    if present is None:
        raise UsageError(f"{given.source} holds no cluster secret any more; put it back, or start again")
    try:
        following.secret, following.problem = given._read_next(), ""
    except UsageError as error:
        if str(error) != following.problem:
            logger.warning("the cluster's secrets stay as they are: %s", error)
        following.problem = str(error)
    return (present,) if following.secret is None else (present, following.secret)


@dataclass(frozen=True, slots=True)
class Passwords:
    """The passwords and secrets of many ledgers, with which one call can check all of them.

    Attributes:
        default: The password of every ledger that no other field names; None for none.
        types: Passwords by ledger type; secrets for ledgers that were created with one.
        ledgers: Passwords or secrets by ledger id.
        secret: The secret of every ledger that was created with one and that no other field names; None for none.
    """

    default: bytes | None = field(default=None, repr=False)
    types: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    ledgers: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Check the types, because a password that is not bytes, or is never found, would check nothing."""
        if self.default is not None:
            checked_password(self.default)
        if self.secret is not None:
            checked_secret(self.secret)
        for name, passwords in (("types", self.types), ("ledgers", self.ledgers)):
            if not isinstance(passwords, Mapping):
                raise UsageError(f"{name} takes a mapping to passwords, not {type(passwords).__name__}")
            for password in passwords.values():
                checked_password(password)
        for ledger_type in self.types:
            if not isinstance(ledger_type, str):
                raise UsageError(f"types names ledger types by strings, not {ledger_type!r:.100}")
        for ledger_id in self.ledgers:
            if whole(ledger_id) is None:
                raise UsageError(f"ledgers names ledgers by id, a whole number, not {ledger_id!r:.100}")

    def of(self, ledger_id: int, ledger_type: str, kind: KeyKind = KeyKind.PASSWORD) -> bytes | None:
        """Return the password, or the secret, of a ledger: by its id, else by its type, else the default of its kind.

        Args:
            ledger_id: The ledger.
            ledger_type: Its type.
            kind: The kind in its metadata.
        """
        default = self.secret if kind is KeyKind.SECRET else self.default
        return self.ledgers.get(ledger_id, self.types.get(ledger_type, default))

    @classmethod
    def read(
        cls, path: str, default: bytes | None = None, *, secret: bytes | None = None, private: bool = False
    ) -> Self:
        """Read passwords and secrets from a TOML file; see ``docs/concepts/seals.md``.

        Args:
            path: The file.
            default: The default if the file has none.
            secret: The secret if the file has none.
            private: Whether the file, and the files that it names, are refused if every user may read or change them.

        Raises:
            UsageError: A file cannot be read or is not private, or is not a valid file of passwords.
        """
        data = read_secret_file(path, private=flag_of(private, "private"), bytes_max=_PASSWORDS_BYTES_MAX)
        try:
            values = tomllib.loads(data.decode())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(
                f'{path} is to hold passwords in TOML: {error}; it has lines such as default = "..."'
            ) from None
        unknown = values.keys() - {"default", "types", "ledgers", "secret"}
        types, ledgers = values.get("types", {}), values.get("ledgers", {})
        if unknown or not isinstance(types, dict) or not isinstance(ledgers, dict):
            raise UsageError(
                f"{path} holds default = PASSWORD, secret = SECRET and the tables [types] and [ledgers], and nothing "
                "else"
            )
        wrong = [name for name in ledgers if not name.isdecimal() or not name.isascii()]
        if wrong:
            raise UsageError(f"{path}: [ledgers] names ledgers by id, a whole number, not {wrong[0]!r:.100}")
        given = partial(_password_in, path, private=private)
        return cls(
            default=given("default", values["default"]) if "default" in values else default,
            types={name: given(f"types.{name}", value) for name, value in types.items()},
            ledgers={int(name): given(f"ledgers.{name}", value) for name, value in ledgers.items()},
            secret=given("secret", values["secret"]) if "secret" in values else secret,
        )


def known_credentials(passwords: Passwords, ledger_id: int, ledger_type: str, kind: KeyKind) -> Credentials | None:
    """Return the result of ``Passwords.of`` for a ledger as credentials; None if it has none."""
    value = passwords.of(ledger_id, ledger_type, kind)
    if value is None:
        return None
    return Credentials(secret=value) if kind is KeyKind.SECRET else Credentials(value)


def _password_in(path: str, name: str, value: Any, *, private: bool) -> bytes:
    """Return the password of a value in a file of passwords: a text, or a table with ``file`` or ``base64``."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and len(value) == 1:
        [(how, text)] = value.items()
        if how == "file" and isinstance(text, str):
            return read_secret_file(text, private=private)
        if how == "base64" and isinstance(text, str):
            try:
                return a2b_base64(text, strict_mode=True)
            except ValueError:
                raise UsageError(f"{path}: {name} is not base64") from None
    raise UsageError(
        f'{path}: {name} takes a password as "text", {{ file = "/path/of/a/file" }} or {{ base64 = "..." }}'
    )
