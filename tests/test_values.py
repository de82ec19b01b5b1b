"""Values in messages."""

from __future__ import annotations

import pytest

from pybk.values import LISTED_MAX, listed


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2 and 1 more"), (9, "0, 1, 2 and 6 more")]
)
def test_a_message_has_some_items_and_the_number_of_the_others(count: int, text: str) -> None:
    assert listed(range(count), 3) == text


def test_a_message_has_no_more_items_than_people_read() -> None:
    assert listed(range(1000)).endswith(f"{LISTED_MAX - 1} and {1000 - LISTED_MAX} more")
