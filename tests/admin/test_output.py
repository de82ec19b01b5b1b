"""What the commands print."""

from __future__ import annotations

import json

import pytest

from pybk.admin.cli.output import print_json, print_json_line
from pybk.flags import StorageHint


def test_json_has_sorted_keys_and_the_values_of_text_enums(capsys: pytest.CaptureFixture[str]) -> None:
    print_json_line({"tier": StorageHint.HDD, "ledgers": (1, 2)})
    out = capsys.readouterr().out
    assert out == '{"ledgers": [1, 2], "tier": "hdd"}\n'
    assert json.loads(out) == {"ledgers": [1, 2], "tier": "hdd"}
    print_json({"ledgers": [1]})
    assert json.loads(capsys.readouterr().out) == {"ledgers": [1], "schema": 1}


@pytest.mark.parametrize("value", [b"bytes", object(), {1, 2}], ids=["bytes", "object", "set"])
def test_a_value_that_json_does_not_have_is_a_mistake_of_the_command(value: object) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        print_json({"value": value})
