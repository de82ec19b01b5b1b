"""The reference has an entry for each public name, error, setting, command, option, metric, route and variable."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pybk import ClusterOptions, LedgerManager, PybkError, StoreConfig, UsageError, public
from pybk.admin.cli import NOUNS, whole_parser
from pybk.admin.exported_metrics import EXPORTED, exported_name
from pybk.admin.http.api import OWN_ROUTES, ROUTES
from pybk.manager.arguments import join_cluster
from pybk.metadata.authenticated_values import ValueKind
from pybk.metadata.pointers import POINTER_BYTES_MAX
from pybk.metadata.settings import ClusterSettings
from pybk.options.bookie import OPTIONS
from tests.paths import ROOT

DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
API: dict[str, Any] = runpy.run_path(str(DOCS / "_extensions" / "public_api.py"))
PAGES = {path: path.read_text(encoding="utf-8") for path in sorted(REFERENCE.rglob("*.md"))}
DIRECTIVE = re.compile(r"^\.\. (?:auto(?:class|function|exception|data)|type-alias):: ([\w.]+)$", re.MULTILINE)
PUBLIC: list[str] = API["names_of"]("pybk")
ERRORS = {name for name in PUBLIC if inspect.isclass(kind := getattr(public, name)) and issubclass(kind, PybkError)}


def page(name: str) -> str:
    return PAGES[REFERENCE / name]


def directives(name: str, text: str) -> list[str]:
    """Return the arguments of all directives of a name, of Markdown and of reST."""
    return re.findall(rf"^(?:```\{{{name}\}}|\.\. {name}::) ?(\S*)$", text, re.MULTILINE)


# ---- public names --------------------------------------------------------------------------------------------------


def with_entries() -> list[str]:
    return [name for text in PAGES.values() for name in DIRECTIVE.findall(text)]


@pytest.mark.parametrize("module", API["MODULES"])
def test_each_public_name_has_one_entry(module: str) -> None:
    names = [f"{module}.{name}" for name in API["names_of"](module) if module != "pybk" or name not in ERRORS]
    found = [name for name in with_entries() if name.rpartition(".")[0] == module and name != "pybk.PybkError"]
    assert sorted(found) == sorted(names)


def test_each_module_with_public_names_is_known() -> None:
    """Whatever a program of the documents or an example imports is public; those of the design show the inside."""
    known = {f"{module}.{name}" for module in API["MODULES"] for name in API["names_of"](module)}
    known |= {"pybk.__version__", "pybk.version.__version__", "pybk.credentials.Secret"}
    programs = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")]
    for path in (ROOT / "README.md", *(each for each in DOCS.rglob("*.md") if DOCS / "design" not in each.parents)):
        programs += re.findall(r"^```python\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    used = {
        f"{node.module}.{alias.name}"
        for program in programs
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "pybk"
        for alias in node.names
    }
    assert used <= known
    assert len(used) > 20


def test_each_alias_says_what_it_is_for() -> None:
    aliases = [name for name in API["homes"]() if API["is_alias"](name)]
    assert {"Payload", "Tiers", "Start"} <= set(aliases)
    for name in aliases:
        assert API["alias_of"](name)[1], f"{name} has no docstring after its assignment"
    listed = {name for text in PAGES.values() for name in directives("type-alias", text)}
    assert listed == {f"pybk.{name}" for name in aliases}


def enumerations() -> list[type[Enum]]:
    found = [getattr(import_module(module), name) for module in API["MODULES"] for name in API["names_of"](module)]
    return [kind for kind in found if inspect.isclass(kind) and issubclass(kind, Enum)]


def test_each_member_of_an_enumeration_has_a_docstring() -> None:
    assert {"DigestType", "Scope"} < {kind.__name__ for kind in enumerations()}
    for kind in enumerations():
        [body] = [node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef)]
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.Assign):
                said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert said, f"{kind.__name__}.{ast.unparse(node.targets[0])}"


# ---- errors --------------------------------------------------------------------------------------------------------


def first_below_the_root(kind: type) -> type:
    return kind if kind.__bases__[0] is PybkError else first_below_the_root(kind.__bases__[0])


def test_each_error_is_on_the_page() -> None:
    shown = directives("errors", page("errors.md"))
    branches = {first_below_the_root(getattr(public, name)).__name__ for name in ERRORS - {"PybkError"}}
    assert sorted(shown) == sorted(branches)
    assert directives("error-table", page("errors.md"))


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_each_error_says_what_to_do(name: str) -> None:
    kind: type[PybkError] = getattr(public, name)
    said = API["fields_in"](kind.__doc__)
    if re.match("Base class|Something about", kind.__doc__ or "") and "Remedy" not in said:
        assert kind.__subclasses__(), "nobody raises it"
        return
    assert said["Remedy"].endswith(".")
    assert not kind.outcome_unknown or "Outcome" not in said, "the class says it already"
    assert said.get("Retry", "Yes").startswith("Yes") or not kind.retryable


# ---- settings ------------------------------------------------------------------------------------------------------

OPTION_OBJECTS = {
    "StoreConfig",
    "TierPolicy",
    "ClusterOptions",
    "LedgerOptions",
    "LogSettings",
    "Retention",
    "RepairSettings",
    "PlacementSettings",
    "ScrubSettings",
}


def resolved(path: str) -> Any:
    value: Any = public
    for name in path.split(".")[1:]:
        value = getattr(value, name)
    return value


def names_in(kind: Any) -> set[str]:
    if inspect.isroutine(kind):
        return set(inspect.signature(kind).parameters) - {"self"}
    return {each.name for each in fields(kind)} if hasattr(kind, "__dataclass_fields__") else set(kind.__annotations__)


def tables() -> Iterator[tuple[Any, Any, dict[str, str]]]:
    """Yield, of each table of settings, what describes them, what has their names, and defaults in words."""
    text = page("settings.md")
    for found in re.finditer(r"^\.\. settings:: (pybk\.[A-Z][\w.]+)\n((?:   .*\n|\n)*)", text, re.MULTILINE):
        of = re.search(r"^   :of: (\S+)$", found[2], re.MULTILINE)
        words = dict(re.findall(r"^   (\w+): (.+)$", found[2], re.MULTILINE))
        source = resolved(found[1])
        yield source, resolved(of[1]) if of else source, words


def test_all_objects_of_options_have_their_table() -> None:
    assert {kind.__name__ for _, kind, _ in tables() if inspect.isclass(kind)} == OPTION_OBJECTS
    assert set(OPTION_OBJECTS) >= {name for name in PUBLIC if name.endswith(("Options", "Config", "Policy"))}


def test_each_setting_has_an_effect_and_a_default() -> None:
    for source, kind, words in tables():
        texts = API["arguments_in"](inspect.getdoc(source))
        missing = names_in(kind) - texts.keys()
        assert not missing, f"{kind.__name__}: what do {missing} do? Their docstring is the reference's source"
        if inspect.isclass(kind) and not hasattr(kind, "__dataclass_fields__") and source is kind:
            assert words.keys() == names_in(kind), "defaults that the code does not show stand in settings.md"


def test_the_defaults_of_a_bookie_that_stand_on_the_page_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, Any] = {}

    def join(root: str, listen: list[str], url: str, secret: object, config: StoreConfig, **others: Any) -> None:
        taken.update(others, cluster_secret=secret, replace=others["replace_lost"])

    monkeypatch.setattr("pybk.manager.arguments.connect", SimpleNamespace(join=join))
    needed: ClusterOptions = {"listen": "tcp://127.0.0.1:*", "metadata": "lmdb:///x"}
    join_cluster("x", None, StoreConfig(), read_only=False, options=needed)
    [words] = [words for source, _, words in tables() if source is ClusterOptions]
    in_words = {*needed, "advertise"}
    assert {name: text.strip("`") for name, text in words.items() if name not in in_words} == {
        name: repr(taken[name]) for name in words if name not in in_words
    }


def test_settings_of_a_cluster_are_those_of_its_sections() -> None:
    prefixes = set(re.findall(r"^   :prefix: (\w+)\.$", page("settings.md"), re.MULTILINE))
    assert prefixes == ClusterSettings().as_dict().keys()
    listed = set(re.findall(r"`((?:repair|placement|scrub)\.\w+)`", page("metadata.md")))
    assert listed == {f"{group}.{name}" for group, names in ClusterSettings().as_dict().items() for name in names}


def test_the_payload_of_each_kind_of_metadata_is_described() -> None:
    table = page("metadata.md").partition("| Kind | Payload |\n")[2].partition("\n\n")[0]
    described = set(re.findall(r"^\| ([A-Z_]+)\b", table, re.MULTILINE))
    assert described == {kind.name for kind in ValueKind}
    assert f"POINTER: bytes of its owner, at most {POINTER_BYTES_MAX >> 10} KiB" in page("metadata.md")


# ---- variables of the environment, parameters of URLs, options of Spark --------------------------------------------

OF_TESTS = {"PYBK_SECTION_KEY"}
"""Names in the sources that are no variables."""


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of the settings."""
    section = page("settings.md").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def quoted(cell: str) -> set[str]:
    return set(re.findall(r"`([^`]+)`", cell))


def test_each_variable_is_listed() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    variable = re.compile(r'"(PYBK_[A-Z_]+|XDG_\w+|NO_COLOR|\w+_DIRECTORY|NOTIFY_SOCKET)"')
    read = {name for text in sources for name in variable.findall(text)}
    listed = set.union(*(quoted(row[0]) for row in rows("The environment")))
    assert read - listed - OF_TESTS == set()
    secrets = {
        f"{name}_FILE" for name in ("PYBK_PASSWORD", "PYBK_SECRET", "PYBK_CLUSTER_SECRET", "PYBK_ZOOKEEPER_AUTH")
    }
    assert listed - read == {*secrets, "PYBK_CLUSTER_SECRET_NEXT"}
    assert directives("bookie-options", page("settings.md")), "the variables of a bookie"
    assert all(option.help for option in OPTIONS)


def test_each_parameter_of_a_url_is_listed() -> None:
    from pybk.metadata.store import SETTINGS

    assert set.union(*(quoted(row[0]) for row in rows("The URL of a metadata store"))) == SETTINGS


def accepted_by_spark() -> Iterator[set[str]]:
    """Yield the options of each kind of read and write, which the error for an unknown one names."""
    from pybk.spark.log_sink.log_sink_options import log_sink_options
    from pybk.spark.log_source.log_options import log_options
    from pybk.spark.options import sink_options, source_options

    for parse in (source_options, log_options, sink_options, log_sink_options):
        for streaming in (False, True):
            with pytest.raises(UsageError, match="there is no option 'q9'") as refused:
                parse({"q9": "1"}, streaming=streaming)
            yield set(str(refused.value).partition("there are ")[2].split(", "))


def test_each_option_of_spark_is_listed_with_its_default() -> None:
    from pybk.spark import options
    from pybk.spark.log_sink.log_sink_options import log_sink_options
    from pybk.spark.log_source.log_options import log_options

    table = rows("Spark")
    assert set.union(*(quoted(row[0]) for row in table)) == set.union(*accepted_by_spark())
    cells = {(name, "writes" if "writes" in row[1] else "reads"): row[3] for row in table for name in quoted(row[0])}
    source = options.source_options({"path": "/x", "ledger": "1"}, streaming=False)
    assert cells["payload", "reads"] == f"`{str(source.payload).lower()}`"
    assert cells["includeMetadata", "reads"] == f"`{str(source.include_metadata).lower()}`"
    assert cells["failOnDataLoss", "reads"] == f"`{str(source.fail_on_data_loss).lower()}`"
    assert cells["requireSeal", "reads"] == f"`{str(source.require_seal).lower()}`"
    assert cells["batchBytes", "reads"] == f"{source.batch_bytes >> 20} MiB"
    assert cells["startEntry", "reads"] == str(source.start_entry)
    logs = log_options({"path": "/x", "log": "orders"}, streaming=False)
    assert cells["columns", "reads"] == f"`{logs.columns}`"
    assert cells["includeHeaders", "reads"] == f"`{str(logs.include_headers).lower()}`"
    assert cells["allowMissing", "reads"] == f"`{str(logs.allow_missing).lower()}`"
    assert cells["maxTriggerDelay", "reads"] == f"{logs.max_trigger_delay_s / 60:.0f} minutes"
    given = {"metadataUri": "lmdb:///x", "passwordFile": "/p"}
    sink = options.sink_options(given, streaming=False)
    assert cells["digestType", "writes"] == f"`{sink.digest_type.name}`"
    assert cells["insecure", "writes"] == f"`{str(sink.insecure).lower()}`"
    assert cells["retainRead", "writes"] == f"`{str(sink.retain_read).lower()}`"
    assert cells["retainUnread", "writes"] == f"`{str(sink.retain_unread).lower()}`"
    assert (sink.retain_age_s, sink.retain_bytes) == (None, None)
    assert cells["retainAge", "writes"] == cells["retainBytes", "writes"] == "no limit"
    to_log = log_sink_options({**given, "topic": "orders"}, streaming=False)
    assert cells["createTopics", "writes"] == f"`{str(to_log.create).lower()}`"
    with pytest.raises(UsageError, match="empty password"):
        options.sink_options({"metadataUri": "lmdb:///x"}, streaming=False)


# ---- commands ------------------------------------------------------------------------------------------------------


def test_each_noun_has_its_page() -> None:
    for noun in NOUNS:
        assert directives("command-options", page(f"commands/{noun.name}.md")) == [noun.name]
        assert f"\ncommands/{noun.name}\n" in page("commands.md")
    assert len(list((REFERENCE / "commands").iterdir())) == len(NOUNS)
    assert directives("common-options", page("commands.md"))


def test_each_option_of_a_command_has_a_help() -> None:
    commands: dict[str, Any] = runpy.run_path(str(DOCS / "_extensions" / "argument_texts.py"))
    count = 0
    for words, parser in whole_parser().commands():
        for _, actions in commands["groups_of"](parser):
            for action in actions:
                assert commands["help_of"](parser, action), f"pybk {' '.join(words)}: {action.option_strings}"
                assert commands["signature_of"](action)
                count += 1
    assert count > 500


# ---- metrics and routes --------------------------------------------------------------------------------------------


def test_each_metric_is_listed() -> None:
    listed = set(re.findall(r"^\| `(pybk_\w+)` \|", page("metrics.md"), re.MULTILINE))
    assert {exported_name(name, each.kind) for name, each in EXPORTED.items()} <= listed


def test_each_route_is_listed() -> None:
    assert directives("http-routes", page("routes.md")) == [""]
    listed = re.findall(r"^\| `((?:GET|POST) \S+)`( \*)? \| (\w+) \|", page("http.md"), re.MULTILINE)
    assert len(set(listed)) == len(listed)
    known = {
        (f"{each.method} {each.template}", " *" * (each in ROUTES and not each.cluster), each.scope.name.lower())
        for each in (*ROUTES, *OWN_ROUTES)
    }
    short = {"{ledger_id}": "ID", "{name}": "NAME", "/api/v1": ""}
    for long, text in short.items():
        known = {(name.replace(long, text), star, scope) for name, star, scope in known}
    assert set(listed) == known


# ---- programs ------------------------------------------------------------------------------------------------------


def test_the_program_that_handles_errors_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [program] = re.findall(r"^```python\n(.*?)^```$", page("errors.md"), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "errors.md", "exec"), {})
    with LedgerManager.open("data") as manager:
        [ledger_id] = manager.list_ledgers()
        with manager.open_ledger(ledger_id, password=b"secret") as reader:
            assert [entry.payload for entry in reader.read(0, 0)] == [b"one"]
