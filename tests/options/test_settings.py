"""Options of a service: flag before variable before file before default, and errors that name what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pybk.admin.cli.command_parser import CommandParser, fill
from pybk.errors import UsageError
from pybk.options.rows import Command, Table
from pybk.options.settings import DEFAULT, missing, read_file, resolve

TABLE = Table("""
@options
  [bookie]
  id --id NAME:text ! | its name
  listen --listen ADDRESS...:addresses | where
  check :switch =true | whether
  once once | once
  [store]
  log_file_bytes BYTES:size | space
  [pace]
  wait_s SECONDS:seconds_of_hour =1.5 | time
  [log]
  level :info,debug =info | level
  file FILE:path = | file
  [cluster]
  secret :secret | secret
""")
OPTIONS = TABLE.options("options")


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "bookie.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def flags(*arguments: str) -> dict[str, Any]:
    parser = CommandParser()
    fill(parser, Command(("pybk", "serve"), "", OPTIONS, "", ""))
    return vars(parser.parse_args(arguments))


def test_the_first_that_is_given_counts(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '[bookie]\nid = "file"\nlisten = ["a,b", "c"]\ncheck = false\n[store]\n'
        'log_file_bytes = "64MiB"\n[pace]\nwait_s = 2\n',
    )
    file = read_file(path, OPTIONS)
    environment = {"PYBK_BOOKIE_ID": "variable", "PYBK_BOOKIE_LISTEN": "d, e", "PYBK_STORE_LOG_FILE_BYTES": "2MiB"}
    given = flags("--id", "flag", "--listen", "f,g", "--listen", "h", "--bookie-once", "--no-bookie-check")
    names = ("bookie.id", "bookie.listen", "store.log_file_bytes", "pace.wait_s", "bookie.check", "log.level")
    for settings, expected in (
        (
            resolve(OPTIONS, given, environment, file),
            [("flag", "--id"), (("f,g", "h"), "--listen"), (2 << 20, "PYBK_STORE_LOG_FILE_BYTES"), (2.0, path)],
        ),
        (
            resolve(OPTIONS, {}, environment, file),
            [
                ("variable", "PYBK_BOOKIE_ID"),
                (("d", "e"), "PYBK_BOOKIE_LISTEN"),
                (2 << 20, "PYBK_STORE_LOG_FILE_BYTES"),
            ],
        ),
        (
            resolve(OPTIONS, {}, {"PYBK_BOOKIE_ID": ""}, file),
            [("file", path), (("a,b", "c"), path), (64 << 20, path), (2.0, path), (False, path), ("info", DEFAULT)],
        ),
        (
            resolve(OPTIONS, {}, {}, None),
            [(None, DEFAULT), ((), DEFAULT), (64 << 20, DEFAULT), (1.5, DEFAULT), (True, DEFAULT), ("info", DEFAULT)],
        ),
    ):
        found = [(settings[name].value, settings[name].origin) for name in names]
        assert found[: len(expected)] == expected
    assert [option.name for option in missing(resolve(OPTIONS, {}, {}, None))] == ["bookie.id"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[bookie]\nidd = "x"', ["[bookie] idd = 'x'", "did you mean id?", "It takes id, listen, check"]),
        ('[bookie]\nmaximum_of_all = "x"', ["there is no key maximum_of_all in [bookie]. It takes id, listen, check"]),
        ('[boookie]\nid = "x"', ["[boookie] id", "[bookie], [store], [pace], [log]"]),
        ('id = "x"', ["id = 'x'", "keys stand in a table, such as [bookie]"]),
        ("[bookie]\nid = 5", ["[bookie] id = '5'", "a text that is not empty"]),
        ('[bookie]\nlisten = "a"', ["[bookie] listen = 'a'", 'a list of texts, such as ["one", "two"]']),
        ('[bookie]\ncheck = "yes"', ["[bookie] check = 'yes'", "true or false"]),
        ("[bookie]\nonce = true", ["[bookie] once", "it concerns one start only", "--bookie-once"]),
        ("[store]\nlog_file_bytes = 5", ["log_file_bytes = '5'", "from 1048576 to 1073741824", "64MiB"]),
        ("[store]\nlog_file_bytes = true", ["log_file_bytes = 'True'", "a number of bytes"]),
        ('[store]\nlog_file_bytes = "5 apples"', ["log_file_bytes = '5 apples'"]),
        ("[pace]\nwait_s = 3601", ["wait_s = '3601'", "a time from 0 to 3600 s"]),
        ('[log]\nlevel = "loud"', ["level = 'loud'", "info or debug"]),
        ('[cluster]\nsecret = "hush"', ["[cluster] secret:", "PYBK_CLUSTER_SECRET"]),
        ('[cluster]\nsecret_x = "hush"', ["[cluster] secret_x:", "there is no table [cluster]"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        resolve(OPTIONS, {}, {}, read_file(path, OPTIONS))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert [part for part in parts if part not in message] == []
    assert "hush" not in message


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    file = read_file(written(tmp_path, "[bookie]\nid = 5\nlisten = 6\n"), OPTIONS)
    with pytest.raises(UsageError, match=r"id = '5'.*listen = '6'.*PYBK_LOG_LEVEL: 'loud'"):
        resolve(OPTIONS, {}, {"PYBK_LOG_LEVEL": "loud"}, file)
    with pytest.raises(UsageError, match="is to hold options in TOML"):
        read_file(written(tmp_path, "[bookie"), OPTIONS)
    with pytest.raises(UsageError, match="No such file"):
        read_file(str(tmp_path / "none"), OPTIONS)


def test_variables_that_no_option_has_are_named() -> None:
    with pytest.raises(UsageError, match="PYBK_BOOKIE_IDD, which no option has; did you mean PYBK_BOOKIE_ID"):
        resolve(OPTIONS, {}, {"PYBK_BOOKIE_IDD": "x"}, None)
    with pytest.raises(UsageError, match="PYBK_BOOKIE_ONCE, which no option has"):
        resolve(OPTIONS, {}, {"PYBK_BOOKIE_ONCE": "true"}, None)
    resolve(OPTIONS, {}, {"PYBK_CLUSTER_OTHER": "x", "PYBK_PASSWORD": "y"}, None, variables=("PYBK_CLUSTER_OTHER",))


def test_wrong_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        flags("--store-log-file-bytes", "lots")
    assert (
        "argument --store-log-file-bytes: 'lots' is not accepted, it takes a number of bytes" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit, match="2"):
        flags("--cluster-secret", "hush")


def test_values_that_python_cannot_write_or_nest_are_named(tmp_path: Path) -> None:
    file = read_file(written(tmp_path, f"[bookie]\nid = 0x{'f' * 5000}\n"), OPTIONS)
    assert "[bookie] id = (a number that is too long): it takes" in file.problems[0]
    with pytest.raises(UsageError, match="is to hold options in TOML"):
        read_file(written(tmp_path, f"x = {'[' * 100_000}"), OPTIONS)
