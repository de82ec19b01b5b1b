"""``x_async`` of every public call ``x``: the signature of the call, and the thread that makes it."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest

from pybk import BlobStore, RemoteConsumer, public
from pybk.manager.handle import opening_form
from pybk.threads.call_threads import asyncio_form
from tests.waiting import WAIT_S

VARIABLE: Final = contextvars.ContextVar("VARIABLE", default="")

RETURN_LISTS: Final = {"LedgerManager.list_ledgers_async", "WriteAheadLog.read_many_async"}
"""Forms that return as a list what their calls yield."""

WAIT: Final = {
    *("close", "commit", "force", "seal", "sync", "roll", "promote"),
    *("adopt", "merge_segments", "put", "save", "write"),
    *("seek", "skip", "skip_all", "truncate_after", "truncate_before"),
}
"""Calls that wait for bookies or for other calls, or that end something; each is made in a thread of its own."""

SEEK_AT_ONCE: Final = {"LogReader.seek_async"}
"""A reader moves without waiting; a subscription waits until its new place is durable."""


class Form(NamedTuple):
    """A public coroutine function, and the call that it is the form of."""

    owner: type | None
    call: str
    sync: Any
    made: Any

    @property
    def is_by_hand(self) -> bool:
        return inspect.unwrap(self.made) is self.made


def forms() -> Iterator[Any]:
    functions = {name: value for name, value in vars(public).items() if inspect.isfunction(value)}
    kinds = [value for value in vars(public).values() if inspect.isclass(value)]
    for owner, members in [(None, functions), *((kind, dict(inspect.getmembers(kind))) for kind in kinds)]:
        for name, value in members.items():
            call = name.removesuffix("_async")
            sync = members.get(call)
            if (
                not name.startswith("_")
                and call != name
                and inspect.iscoroutinefunction(value)
                and inspect.isroutine(sync)
            ):
                label = f"{owner.__name__}.{name}" if owner else name
                yield pytest.param(Form(owner, call, sync, getattr(value, "__func__", value)), id=label)


FORMS: Final = list(forms())
MADE: Final = [each for each in FORMS if not each.values[0].is_by_hand]


def test_most_forms_are_made_by_the_one_function() -> None:
    by_hand = {each.id for each in FORMS} - {each.id for each in MADE}
    assert by_hand - RETURN_LISTS == {
        "ClusterAdmin.drain_async",
        "ClusterAdmin.ok_to_remove_async",
        "LogReader.read_async",
        "LogReader.read_many_async",
        "RemoteConsumer.read_async",
        "Subscription.read_async",
        "Subscription.read_many_async",
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_form_has_the_signature_of_its_call(form: Form, request: pytest.FixtureRequest) -> None:
    made, sync = inspect.signature(form.made), inspect.signature(getattr(form.sync, "__func__", form.sync))
    if request.node.callspec.id in RETURN_LISTS:
        made = made.replace(return_annotation=sync.return_annotation)
    assert made == sync


@pytest.mark.parametrize("form", MADE)
def test_a_form_is_named_after_its_call_and_describes_itself(form: Form) -> None:
    sync, made = inspect.unwrap(form.made), form.made  # which a base class may have
    assert made.__module__ == sync.__module__
    assert (made.__name__, made.__qualname__) == (f"{sync.__name__}_async", f"{sync.__qualname__}_async")
    assert made.__doc__.startswith(f"Make the call ``{sync.__name__}`` in a thread")


@pytest.mark.parametrize("form", [each for each in MADE if each.values[0].owner])
def test_a_form_calls_the_method_of_its_object_in_the_right_thread(form: Form, request: pytest.FixtureRequest) -> None:
    assert form.owner is not None

    def replaced(_: Any, /, *arguments: object, **options: object) -> tuple[object, ...]:
        return threading.current_thread().name, VARIABLE.get(), arguments, options

    is_of_class = inspect.ismethod(form.sync)
    owner: Any = type("Owner", (form.owner,), {form.call: classmethod(replaced) if is_of_class else replaced})
    called = owner if is_of_class else owner.__new__(owner)

    async def use() -> Any:
        VARIABLE.set("of the coroutine")
        return await getattr(called, f"{form.call}_async")(1, key=2)

    thread, *others = asyncio.run(use())
    assert others == ["of the coroutine", (1,), {"key": 2}]
    waits = form.call in WAIT and request.node.callspec.id not in SEEK_AT_ONCE
    assert thread.startswith("pybk-wait" if waits or form.owner is RemoteConsumer else "pybk-call")


# ---- the function --------------------------------------------------------------------------------------------------


def where(call: Callable[[], object]) -> str:
    """Return the name of the thread."""
    call()
    return threading.current_thread().name


where_async = asyncio_form(where)


class Kind(ABC):
    @abstractmethod
    def overridden(self) -> str:
        """Return something."""

    overridden_async = asyncio_form(overridden)

    @classmethod
    def of_class(cls, number: int) -> tuple[str, int]:
        """Return the name of the class, and the number."""
        return cls.__name__, number

    of_class_async = classmethod(asyncio_form(of_class))


class SubKind(Kind):
    def overridden(self) -> str:
        return "by the subclass"


class Door:
    def __init__(self, number: int, *, wide: bool = False) -> None:
        self.opened = number, wide

    def close(self) -> None:
        self.opened = 0, False


class House:
    def door(self, number: int, *, wide: bool = False) -> Door:
        """Open a door."""
        return Door(number, wide=wide)

    door_async = opening_form(door)


class NarrowHouse(House):
    def door(self, number: int, *, wide: bool = False) -> Door:
        return Door(-number, wide=wide)


def test_forms_of_functions_and_methods() -> None:
    async def use() -> None:
        assert (await where_async(int)).startswith("pybk-call")
        assert await SubKind().overridden_async() == "by the subclass"
        assert await SubKind.of_class_async(number=1) == ("SubKind", 1)
        with pytest.raises(ZeroDivisionError):
            await where_async(lambda: 1 // 0)
        with pytest.raises(TypeError, match="missing 1 required"):
            await where_async()  # type: ignore[call-arg]

    asyncio.run(use())


def test_a_form_says_that_its_thread_calls_functions_among_the_arguments() -> None:
    assert (where_async.__doc__ or "").endswith(
        "so that the event loop keeps running. Functions that it is given run there."
    )
    assert (SubKind.of_class_async.__doc__ or "").endswith("so that the event loop keeps running.")


def test_a_cancelled_form_is_made_all_the_same() -> None:
    began, proceed, made = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        began.set()
        assert proceed.wait(WAIT_S)
        made.set()

    async def use() -> None:
        waiting = asyncio.create_task(where_async(call))
        while not began.is_set():
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not made.is_set()
        proceed.set()
        assert await where_async(lambda: made.wait(WAIT_S))
        assert made.is_set()

    asyncio.run(use())


# ---- what opens a handle -------------------------------------------------------------------------------------------


def test_the_form_of_what_opens_a_handle_opens_it_once_it_is_awaited() -> None:
    async def use() -> None:
        opening = House().door_async(3, wide=True)
        assert repr(opening) == "<Opening House.door_async(3), not awaited>"
        assert (await opening).opened == (3, True)
        assert (await NarrowHouse().door_async(3)).opened == (-3, False)

    asyncio.run(use())


def test_the_form_of_what_opens_a_handle_has_the_arguments_of_its_call() -> None:
    made, sync = inspect.signature(BlobStore.create_blob_async), inspect.signature(BlobStore.create_blob)
    assert made.parameters == sync.parameters
    assert made.return_annotation == "Opening[BlobUpload]"
    form: Any = House.door_async
    assert (form.__name__, form.__qualname__, form.__module__) == ("door_async", "House.door_async", __name__)
