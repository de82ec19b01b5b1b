"""Reads the table of all commands and options; ``table.py`` describes how it is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any, Final

from pybk.config import StoreConfig
from pybk.metadata.store import without_secrets
from pybk.options.kinds import Kind, kind_of
from pybk.options.table import TABLE

PREFIX: Final = "PYBK"
"""The beginning of the variables of all options of services."""

_COUNTS: Final = ("...", "?", "*", "+")
_STORE_DEFAULTS: Final[Mapping[str, Any]] = {each.name: each.default for each in fields(StoreConfig)}


class Row:
    """An argument of a command, or an option of a service.

    Attributes:
        flags: Its flags; none for an argument without one.
        metavar: The name of its value in ``--help``.
        count: The number of times that it may be given: ``?``, ``*``, ``+`` or ``...``; empty for once.
        kind: The name of its kind, or its choices; empty for a text, or a switch.
        default: Its default as text; None for none.
        dest: Its name in the code; empty if that follows from the flag or the metavar.
        const: The value of a flag that takes none; empty for true.
        excludes: ``^`` or ``^!`` if it excludes the other rows that have it; empty if it does not.
        words: The further words of its row: ``!``, ``once``, ``reload``.
        title: The title of its group in ``--help``; empty for none.
        section: The table in TOML of an option of a service; empty for others.
        key: The key of the option there.
        help: Its meaning.
        default_words: The default in words; empty for none.
        variable: Its environment variable; empty for none.
    """

    variable = ""

    def __init__(self, text: str, title: str = "", section: str = "") -> None:
        left, _, self.help = text.partition(" | ")
        words = left.split()
        self.title, self.section, self.key, self.default_words = title, section, "", ""
        if section:
            self.key = words.pop(0)
            self.help, _, self.default_words = self.help.partition(" | ")
        self.flags, self.metavar, self.count, self.kind = [word for word in words if word[0] == "-"], "", "", ""
        self.default: str | None = None
        self.dest, self.const, self.excludes = "", "", ""
        self.words: set[str] = set()
        for word in words:
            self._read(word)

    def _read(self, word: str) -> None:
        if word[0] == "=":
            self.default = word[1:]
        elif word[0] == ">":
            self.dest, _, self.const = word[1:].partition(":")
        elif word[0] == "^":
            self.excludes = word
        elif word in ("!", "once", "reload"):
            self.words.add(word)
        elif word[0] != "-":
            colon = word.rfind(":")
            kind = word[colon + 1 :] if colon >= 0 else ""
            if kind and ("," in kind or not kind.isupper()):
                word, self.kind = word[:colon], kind
            self.count = next((count for count in _COUNTS if word.endswith(count)), "")
            self.metavar = word.removesuffix(self.count)

    @cached_property
    def reader(self) -> Kind:
        """The reader of its values; raises KeyError for a kind that does not exist."""
        return kind_of(self.kind, self.key)

    @property
    def choices(self) -> list[str]:
        """The values that it may have; empty if any value is allowed."""
        return self.kind.split(",") if "," in self.kind else []

    @property
    def is_switch(self) -> bool:
        """True if it takes no value."""
        return bool(self.flags) and not self.metavar and not self.kind

    @property
    def notes(self) -> list[str]:
        """The notes that ``--help`` adds to its meaning: its default, whether it may be repeated, and its variable."""
        shown = "" if self.is_switch else self.shown_default
        repeated = "may be repeated" if self.count == "..." else ""
        notes = (f"default: {shown}", shown), (repeated, repeated), (f"variable: {self.variable}", self.variable)
        return [note for note, applies in notes if applies]

    @property
    def shown_default(self) -> str:
        """Its default as text for people; empty for none."""
        return self.default_words or self.default or ""


class Option(Row):
    """An option of a service, which a flag, a variable or a file may give.

    Attributes:
        required: Whether the service needs it.
        once: Whether it concerns one start only; it may then stand neither in a file nor in the environment.
        secret: Whether it is a secret, which only the environment may have, and which is never shown.
        unset: Its value if none is given.
    """

    def __init__(self, text: str, title: str = "", section: str = "") -> None:
        super().__init__(text, title, section)
        self.required, self.once, self.secret = "!" in self.words, "once" in self.words, self.kind == "secret"
        self.variable = "" if self.once else f"{PREFIX}_{section}_{self.key}".upper()
        self.unset: Final[Any] = self._unset()

    def _unset(self) -> Any:
        if self.section == "store":
            return _STORE_DEFAULTS[self.key]
        if self.count or self.once:
            return () if self.count else False
        return self.reader.of_text(self.default) if self.default else self.default

    @property
    def name(self) -> str:
        """Its name: section and key."""
        return f"{self.section}.{self.key}"

    @property
    def flag(self) -> str:
        """Its flag, or ``PATH`` for an argument without one; "" for a secret."""
        if self.secret or self.metavar == "PATH":
            return "" if self.secret else "PATH"
        return self.flags[0] if self.flags else f"--{self.section}-{self.key}".replace("_", "-")

    @property
    def in_file(self) -> bool:
        """True if a file may have it."""
        return not self.once and not self.secret

    @property
    def shown_default(self) -> str:
        """Its default as text for people; empty for none."""
        return self.default_words or self.shown(self.unset)

    def shown(self, value: Any) -> str:
        """Return a value as text for ``config show`` and the documents."""
        if value is None or value == ():
            return ""
        if self.secret:
            return "(hidden)"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, float):
            return f"{value:g}"
        text = ", ".join(value) if isinstance(value, tuple) else str(value)
        return without_secrets(text) if self.kind == "url" else text


class Command:
    """A command, or a noun with verbs.

    Attributes:
        words: The words by which it is called.
        text: Its effect.
        rows: Its arguments; none for a noun with verbs.
        verb: The default verb of a noun, if the next word is not a verb; empty if a verb is needed.
        verbs_name: The name of the verbs in ``--help``.
    """

    def __init__(self, words: tuple[str, ...], text: str, rows: Sequence[Row], verb: str, verbs_name: str) -> None:
        self.words, self.text, self.rows, self.verb, self.verbs_name = words, text, rows, verb, verbs_name

    @property
    def name(self) -> str:
        """Its last word."""
        return self.words[-1]

    @property
    def description(self) -> str:
        """The effect of the command, with the default verb if it has one."""
        return f"{self.text}. Where the next word is no verb, {self.verb} is meant" if self.verb else self.text


class Table:
    """The commands and sets that the table declares.

    Args:
        text: Its text.
    """

    def __init__(self, text: str) -> None:
        blocks = list(_blocks(text))
        self._sets: Final = {head.partition(" ")[0]: (head, body) for head, body in blocks if head[0] == "@"}
        self._made: Final = dict[tuple[str, str], list[Row]]()
        self.commands: Final[Mapping[tuple[str, ...], Command]] = dict(self._commands(blocks))

    def rows(self, name: str) -> list[Row]:
        """Return the rows of a set, with those of the sets that it includes."""
        return self._rows(f"@{name}", "")

    def options(self, name: str) -> tuple[Option, ...]:
        """Return the options of a service that a set has."""
        return tuple(row for row in self.rows(name) if isinstance(row, Option))

    def verbs(self, *words: str) -> list[Command]:
        """Return the verbs of a command, in order; the nouns if no word is given."""
        count = len(words)
        return [each for each in self.commands.values() if each.words[:-1] == words and len(each.words) == count + 1]

    def _commands(self, blocks: Iterable[tuple[str, list[str]]]) -> Iterator[tuple[tuple[str, ...], Command]]:
        for head, body in blocks:
            left, _, text = head.partition(" | ")
            words = [word for word in left.split() if word[0] not in "@("]
            if not words:
                continue
            verb = left.partition("(")[2].rstrip(")")
            verbs_name = words.pop() if words[-1].isupper() else "VERB"
            for noun in words[0].split(","):
                name = (noun, *words[1:])
                yield name, Command(name, text, list(self._of(left, body, "")), verb, verbs_name)

    def _rows(self, name: str, text: str) -> list[Row]:
        made = self._made.get((name, text))
        if made is None:
            head, body = self._sets[name]
            made = self._made[name, text] = list(self._of(head.partition(" ")[2], body, text))
        return made

    def _of(self, left: str, body: Iterable[str], text: str) -> Iterator[Row]:
        """Yield the rows of the sets that the words on the left name, and of a body; ``text`` stands for ``{}``."""
        for word in left.split():
            if word[0] == "@":
                yield from self._rows(word, text)
        title = section = ""
        for line in body:
            if line[0] == "@":
                names, _, more = line.partition(" | ")
                yield from self._of(names, (), more)
            elif line[0] == "[":
                title, section = line, line[1:-1]
            elif line.startswith("== "):
                title = line[3:]
            else:
                yield (Option if section else Row)(line.replace("{}", text), title, section)


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each line at the margin, and the lines below it; lines that are continued are joined."""
    head, body = "", list[str]()
    for line in text.replace("\n      ", " ").splitlines():
        if line.startswith("  "):
            body.append(line.strip())
        elif line:
            if head:
                yield head, body
            head, body = line, []
    if head:
        yield head, body


THE_TABLE = Table(TABLE)
"""The table of all commands and options."""
