"""What the commands print."""

from __future__ import annotations

import json

import pytest

from pybk.admin.cli.output import print_json
from pybk.flags import StorageHint


def test_json_has_sorted_keys_and_the_values_of_text_enums(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"tier": StorageHint.HDD, "ledgers": (1, 2)}, indent=None)
    out = capsys.readouterr().out
    assert out == '{"ledgers": [1, 2], "tier": "hdd"}\n'
    assert json.loads(out) == {"ledgers": [1, 2], "tier": "hdd"}


@pytest.mark.parametrize("value", [b"bytes", object(), {1, 2}], ids=["bytes", "object", "set"])
def test_a_value_that_json_does_not_have_is_a_mistake_of_the_command(value: object) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        print_json({"value": value})
