"""The parser of the command line: nouns, verbs, older names, and errors of one line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from pybk.admin.cli import ALIASES, NOUNS, completed, main, parser_of, whole_parser
from pybk.admin.profiles import Profile
from pybk.options.kinds import KINDS, seconds_of, size_of

COMMANDS = dict(whole_parser().commands())
POSITIVE = "whole number from 1 to 2**63 - 1"


def test_each_command_has_a_help_and_says_how_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for words, parser in COMMANDS.items():
        assert callable(parser.get_default("run")), words
        assert parser.description, words
        assert parser.prog == " ".join(("pybk", *words))
        assert parser.format_help().startswith(f"usage: {parser.prog} ")
    assert {words[0] for words in COMMANDS} == {noun.name for noun in NOUNS}


def test_the_help_of_pybk_names_all_nouns_older_names_and_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    for word in (*(noun.name for noun in NOUNS), *ALIASES, "PYBK_CLUSTER_SECRET", "NO_COLOR", "141"):
        assert word in out


@pytest.mark.parametrize("old", [*ALIASES, "upgrade"])
def test_an_older_name_is_the_same_command(old: str) -> None:
    more = {"cat": ["7"], "reseal": ["7"]}.get(old, [])
    words = completed([old, "data", *more])
    assert words == [*ALIASES[old], "data", *more]
    parsed = parser_of(words[:1]).parse_args(words)
    assert parsed.run is COMMANDS[ALIASES[old]].get_default("run")
    assert parsed.path == "data"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("upgrade zk://host/path --finalize", "cluster upgrade zk://host/path --finalize"),
        ("bookie data --id b", "bookie serve data --id b"),
        ("bookie --config file", "bookie serve --config file"),
        ("bookie", "bookie serve"),
        ("bookie ./list", "bookie serve ./list"),
        ("bookie list zk://host/path", "bookie list zk://host/path"),
        ("bookie --help", "bookie --help"),
        ("scrub ./data", "scrub run ./data"),
        ("scrub zk://host/path", "scrub run zk://host/path"),
        ("backup . s3://bucket/path", "backup make . s3://bucket/path"),
        ("backup --dry-run data x", "backup make --dry-run data x"),
        ("scrub status data", "scrub status data"),
        ("nothing", "nothing"),
        ("", ""),
    ],
)
def test_the_verb_that_is_meant(given: str, meant: str) -> None:
    assert completed(given.split()) == meant.split()


def test_a_misspelt_verb_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["bookie", "listt"])
    assert "listt is no verb; list is one, and ./listt names a new directory" in capsys.readouterr().err
    (tmp_path / "listt").mkdir()
    assert completed(["bookie", "listt"]) == ["bookie", "serve", "listt"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            "backup lisst",
            "lisst is no verb; the verbs are make, verify, show, prune, and ./lisst names a new directory",
        ),
        ("backup list there", "list is no verb; the verbs are make, verify, show, prune"),
        ("backup veriyf there", "veriyf is no verb; verify is one"),
        ("scrub list", "list is no verb; the verbs are run, status, and ./list names a new directory"),
    ],
)
def test_a_word_that_is_neither_a_verb_nor_a_path_makes_no_backup(
    words: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "state"))
    Profile(name="some", metadata=f"lmdb://{tmp_path}/metadata").write()
    before = sorted(tmp_path.iterdir())
    for profile in ([], ["--profile", "some"]):
        with pytest.raises(SystemExit, match="2"):
            main([*profile, *words.split()])
        assert error in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("url", ["s3://key:s3cret@b/x", "s3://key:the s3cret@b/x", "https://h/x?sig=s3cret"])
@pytest.mark.parametrize(
    "words",
    [
        ["backup", "make", "store", "there", "URL"],
        ["backup", "verify", "there", "URL"],
        ["backup", "prune", "there", "--keep", "URL"],
        ["backup", "URL", "there"],
        ["backup", "verify", "URL", "--nothing"],
        ["store", "status", "URL"],
        ["cluster", "status", "URL"],
        ["restore", "there", "URL"],
        ["support", "bundle", "URL"],
    ],
    ids=" ".join,
)
def test_an_error_shows_no_secret_of_a_url(
    words: list[str], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with suppress(SystemExit):
        assert main([url if word == "URL" else word for word in words]) != 0
    said = "".join(capsys.readouterr())
    assert said, "the error is shown"
    assert "s3cret" not in said


def test_an_option_before_the_command_is_said_to_stand_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--json", "ledger", "list", "data"])
    assert "--json stands after the command: pybk ledger list ... --json" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["nothing"], ["ledger"], ["ledger", "nothing"], ["bookie", "list"]])
def test_wrong_usage_is_one_line_that_says_where_the_usage_is(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error = capsys.readouterr().err
    assert error.startswith("pybk")
    assert error.count("\n") == 1
    assert error.endswith("--help\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("bookie drain lmdb:///x b1 --dry-run", "pybk bookie drain: unrecognized arguments: --dry-run; see the usage:"),
        (
            "bookie drain lmdb:///x b1 --wiat",
            "pybk bookie drain: unrecognized arguments: --wiat; did you mean --wait?",
        ),
        (
            "bookie drain b1",
            "pybk bookie drain: the following arguments are required: NAME; the first one is PATH, unless `pybk --pr",
        ),
        ("cluster status --profile dev", "pybk cluster status: --profile NAME stands before the command: pybk --prof"),
        ("cluster status lmdb:///x --profile=dev", "pybk cluster status: --profile NAME stands before the command"),
        ("cluster probe lmdb:///x --bytes -1", "pybk cluster probe: argument --bytes: '-1' is not accepted, it takes"),
        (
            "cluster probe lmdb:///x --entries x",
            "pybk cluster probe: argument --entries: 'x' is not accepted, it takes",
        ),
        (
            "console lmdb:///x --http 127.0.0.1:99999",
            "pybk console: argument --http: '127.0.0.1:99999' is not accepted, it takes HOST:PORT with a port from 1 ",
        ),
        ("dev up -1", "pybk dev up: argument N: '-1' is not accepted, it takes a whole number from 1 to 99;"),
        ("dev up 100", "pybk dev up: argument N: '100' is not accepted, it takes a whole number from 1 to 99;"),
        ("dev up x", "pybk dev up: argument N: 'x' is not accepted, it takes a whole number from 1 to 99;"),
        *(
            (
                f"{words} {number}",
                f"pybk {command}: argument {flag}: '{number}' is not accepted, it takes a {POSITIVE};",
            )
            for words, command, flag in (
                ("ledger list x --limit", "ledger list", "--limit"),
                ("dev corrupt b1 --records", "dev corrupt", "--records"),
                ("backup prune x --keep", "backup prune", "--keep"),
                ("restore x y --run", "restore", "--run"),
            )
            for number in (-1, 0)
        ),
        ("dev logs -n -3", "pybk dev logs: argument -n/--lines: '-3' is not accepted, it takes a whole number"),
    ],
)
def test_wrong_usage_names_the_command_and_what_it_takes(
    words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert capsys.readouterr().err.startswith(error)


def test_a_file_that_cannot_be_written_is_named_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nowhere" / "tokens"
    assert main(["token", "me", "--file", str(path)]) == 2
    assert capsys.readouterr().err == f"pybk: {path}: No such file or directory; check the path\n"


def test_the_bare_text_of_the_system_gets_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, missing = tmp_path / "file", tmp_path / "missing"
    file.touch()
    url = f"lmdb://{tmp_path}/metadata"
    assert main(["cluster", "init", url, "--insecure"]) == 0
    capsys.readouterr()
    for words, text in (
        (("token", "me", "--file", missing / "new"), f"{missing / 'new'}: No such file or directory; check the path"),
        (("support", "bundle", url, file), f"{file}: File exists; name a file that does not exist"),
        (("metadata", "restore", url, missing, "--dry-run"), f"{missing}: No such file or directory; check the path"),
        (("metadata", "export", url, file / "new"), f"{file / 'new'}: Not a directory; check the path"),
        (
            ("metadata", "restore", url, tmp_path, "--dry-run"),
            f"{tmp_path}: a directory, and not a file; name a regular file",
        ),
    ):
        assert main([*map(str, words)]) == 2
        assert capsys.readouterr().err == f"pybk: {text}\n"


def test_times() -> None:
    assert [seconds_of(text) for text in ("90", "1.5s", "10m", "2h", "1d")] == [90, 1.5, 600, 7200, 86_400]
    for text in ("", "x", "-1", "nan", "inf", "1w"):
        with pytest.raises(ValueError, match=r"^$"):
            seconds_of(text)
    assert "it takes a time from 0 to 1000000000 s, such as 90, 30s, 10m" in KINDS["seconds"].wrong("1w")


def test_sizes_and_quorums_are_written_alike_everywhere() -> None:
    assert [size_of(text) for text in ("5", "1k", "2m", "64KiB", "64 MiB", 7)] == [
        5,
        1024,
        2 << 20,
        64 << 10,
        64 << 20,
        7,
    ]
    for text in ("", "k", "1kb", "1kiB", "-1", "1.5m", True, None):
        with pytest.raises(ValueError, match=r"^$"):
            size_of(text)
    assert [KINDS["quorums"].of_text(text) for text in ("3/2/2", "3,3,2")] == [(3, 2, 2), (3, 3, 2)]


@pytest.mark.parametrize("time", ["99999999999999d", "1000000001"])
def test_a_time_that_no_timer_takes_is_refused(time: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cluster", "status", "lmdb:///nowhere", "--timeout", time])
    assert f"'{time}' is not accepted, it takes a time from 0 to 1000000000 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--bytes", "99999999999"], "--bytes is 99999999999; an entry takes at most 5242880 bytes"),
        (["--bytes", "0", "--entries", "9" * 18], "of 0 bytes would take more than 1073741824 bytes of memory"),
        (["--entries", "1000000", "--bytes", "1024"], "; probe with at most 932067, or shorter ones"),
    ],
)
@pytest.mark.parametrize(
    "command", [["cluster", "probe", "lmdb:///nowhere"], ["bookie", "probe", "lmdb:///nowhere", "b"]]
)
def test_a_probe_that_the_memory_does_not_hold_is_refused(
    command: list[str], words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *words]) == 2
    assert says in capsys.readouterr().err
