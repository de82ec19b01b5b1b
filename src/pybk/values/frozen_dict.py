"""A mapping that cannot be changed, and that can be pickled and copied, unlike ``types.MappingProxyType``."""

from __future__ import annotations

from typing import Any, Final, NoReturn, Self, TypeVar

K = TypeVar("K")
V = TypeVar("V")

_MESSAGE: Final = "this mapping cannot be changed; change a copy of it: dict(mapping)"


class FrozenDict(dict[K, V]):
    """A dict that refuses every change.

    It is a dict, so that ``dataclasses.asdict``, ``json`` and ``pickle`` take it as one.

    Threads: any.
    """

    __slots__ = ()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse a change."""
        raise TypeError(_MESSAGE)

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __copy__(self) -> Self:
        """Return the mapping itself, because it cannot be changed."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[dict[K, V]]]:
        """Pickle as a call of the class, because unpickling a dict item by item would change it."""
        return type(self), (dict(self),)
