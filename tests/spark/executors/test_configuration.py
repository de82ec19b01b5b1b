"""The options of executors' bookies in Spark's configuration: their table, their values, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pybk.config import StoreConfig
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.options.bookie import OPTIONS, config_of, rack_of
from pybk.spark.executors.bookie_settings import BookieSettings
from pybk.spark.executors.bookie_start import SETTINGS, configure
from pybk.spark.executors.configuration import (
    KNOWN,
    LEFT_OUT,
    PREFIX,
    configuration_of,
    resolve_for,
    settings_in,
    short_name,
    tiers_in,
)
from tests.paths import ROOT

PLACE = {f"{PREFIX}cluster.metadata": "zk://zk1:2181/ledgers", f"{PREFIX}directory": "/data/bookies"}


def with_options(**more: str) -> BookieSettings:
    texts = {f"{PREFIX}{name.replace('__', '.')}": text for name, text in more.items()}
    return settings_in({**PLACE, **texts, "spark.app.name": "mine"})


MEANINGS = {
    "directory": "the directory of the slots, on each host",
    "cluster.secret_file": "file on each host that holds the cluster's secret; FILE.next may hold the next secret",
    "tier.nvme": "directories for the log, by commas, each on its own device",
    "tier.ssd": "directories for the SSD tier and the index, by commas, each on its own device",
    "tier.hdd": "directories for cold segments, by commas, each on its own device",
}
"""Meanings that differ from those of ``pybk bookie``."""

DEFAULTS = {
    "cluster.secret_file": "the variables `PYBK_CLUSTER_SECRET_FILE`, `PYBK_CLUSTER_SECRET` of executors",
    **{f"tier.{tier}": f"`{tier}` in the slot" for tier in StorageHint},
}


def markdown_table() -> str:
    lines = ["| setting | takes | default | meaning |", "|---|---|---|---|"]
    for name, option in KNOWN.items():
        default = "needed" if option.required else DEFAULTS.get(name, option.shown_default)
        cells = (f"`{PREFIX}{name}`", option.reader.name, default, MEANINGS.get(name, option.help))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_the_documents_have_the_table_of_all_options() -> None:
    document = (ROOT / "docs" / "howto" / "spark.md").read_text(encoding="utf-8")
    table = markdown_table()
    assert table in document, f"put this into docs/howto/spark.md:\n{table}"


def test_each_option_of_a_bookie_is_an_option_or_left_out_with_a_reason() -> None:
    names = {short_name(option) for option in OPTIONS}
    assert names | {"linger_s"} == KNOWN.keys() | LEFT_OUT.keys()
    assert not KNOWN.keys() & LEFT_OUT.keys()


def test_a_configuration_has_tiers_and_the_settings_of_the_store() -> None:
    settings = with_options(
        tier__nvme="/mnt/nvme-1/pybk,/mnt/nvme-2/pybk",
        tier__hdd="/mnt/hdd",
        store__free_bytes_low="1GiB",
        store__free_bytes_ok="2g",
        store__default_tier="ssd",
        linger_s="2m",
        rack="zone/rack",
    )
    assert (settings.directory, settings.linger_s, settings.rack) == ("/data/bookies", 120.0, "zone/rack")
    found = resolve_for(settings, {})
    assert config_of(found) == StoreConfig(free_bytes_low=1 << 30, free_bytes_ok=2 << 30, default_tier=StorageHint.SSD)
    assert tiers_in(found, "/data/bookies/slot-3") == {
        StorageHint.NVME: ["/mnt/nvme-1/pybk/slot-3", "/mnt/nvme-2/pybk/slot-3"],
        StorageHint.HDD: ["/mnt/hdd/slot-3"],
    }
    assert BookieSettings.of(str(settings)) == settings
    assert settings_in(configuration_of(settings)) == settings


def test_arguments_count_before_the_configuration() -> None:
    given = {"metadata": "lmdb:///m", "directory": None, "rack": None}
    settings = settings_in({**PLACE, f"{PREFIX}store.fill_ratio": "0.5"}, {"store.fill_ratio": "0.6"}, **given)
    assert (settings.metadata, settings.directory) == ("lmdb:///m", "/data/bookies")
    assert config_of(resolve_for(settings, {})).fill_ratio == 0.6


def test_options_of_a_builder_count_where_no_argument_names_another_value() -> None:
    sql = pytest.importorskip("pyspark.sql", reason="no pyspark; install the extra spark-test")
    options = {"rack": "/room", "linger_s": "30", "cluster.secret_file": "/secret", "tier.ssd": "/mnt/ssd"}
    cases: list[tuple[dict[str, Any], tuple[str, float]]] = [
        ({}, ("/room", 30.0)),
        ({"rack": "/hall", "linger_s": 0.0}, ("/hall", 0.0)),
    ]
    for given, expected in cases:
        builder = configure(
            sql.SparkSession.Builder(), metadata="zk://zk1:2181/ledgers", directory="/data", options=options, **given
        )
        settings = BookieSettings.of(builder._options[f"spark.executorEnv.{SETTINGS}"])
        assert (settings.rack, settings.linger_s, settings.options) == (*expected, {"tier.ssd": "/mnt/ssd"})
        assert settings_in(builder._options) == settings
        assert builder._options["spark.executorEnv.PYBK_CLUSTER_SECRET_FILE"] == settings.secret_file == "/secret"


def test_the_environment_of_an_executor_has_what_differs_from_host_to_host(tmp_path: Path) -> None:
    (tmp_path / "rack").write_text("zone/other\n")
    environment = {"PYBK_BOOKIE_RACK_FILE": str(tmp_path / "rack"), "PYBK_STORE_FILL_RATIO": "0.5"}

    def found(settings: BookieSettings) -> tuple[str, float]:
        options = resolve_for(settings, environment)
        return rack_of({name: each.value for name, each in options.items()}), config_of(options).fill_ratio

    assert found(with_options()) == ("zone/other", 0.5)
    assert found(with_options(rack="zone/rack", store__fill_ratio="0.6")) == ("zone/rack", 0.6)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("store.fil_ratio", "0.5", "there is no option spark.pybk.bookie.store.fil_ratio: did you mean .*fill_ratio?"),
        ("store.fill_ratio", "2", "spark.pybk.bookie.store.fill_ratio: '2' is not accepted, it takes a ratio above 0"),
        ("store.free_bytes_low", "much", "free_bytes_low: 'much' is not accepted, it takes a number of bytes"),
        ("store.free_bytes_ok", "1", r"spark.pybk.bookie.store.free_bytes_ok: \[store\]: free_bytes_ok 1 is below"),
        ("tier.ssd", "ssd", "spark.pybk.bookie.tier.ssd is 'ssd'; it takes absolute paths"),
        ("tier.ssd", "/data/bookies", r"spark.pybk.bookie.tier.ssd: \[tier\]: "),
        ("rack_file", "rack", "rack_file is 'rack'; it takes absolute paths"),
        ("rack", "a/b/c/d", r"spark.pybk.bookie.rack: \[bookie\] rack: "),
        ("linger_s", "2 weeks", "linger_s: '2 weeks' is not accepted, it takes a time from 0 to 86400 s"),
        ("listen", "tcp://*:1", "listen is not an option of executors' bookies: a bookie listens, at a free port"),
        ("directory", "bookies", "spark.pybk.bookie.directory is 'bookies'; it takes absolute paths"),
        ("cluster.metadata", "etcd://x", "metadata is 'etcd://x'; it takes lmdb:///path or zk://host:port/path"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(name: str, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        with_options(**{name: text})


def test_a_secret_in_the_configuration_is_refused_and_not_shown() -> None:
    for name in ("cluster.secret", "cluster.sekret"):
        with pytest.raises(UsageError) as refused:
            with_options(**{name: "Tr0ub4dor"})
        assert "cluster.secret_file" in str(refused.value)
        assert "Tr0ub4dor" not in str(refused.value)


def test_the_place_is_needed() -> None:
    with pytest.raises(UsageError, match=r"set spark\.pybk\.bookie\.cluster\.metadata and spark\.pybk\.bookie\.dir"):
        settings_in({"spark.app.name": "mine"})
