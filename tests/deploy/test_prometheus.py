"""A real Prometheus that scrapes real bookies, and has the alert rules."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.cluster.inside import SECRET, make_cluster
from tests.cluster.processes import Child
from tests.deploy.programs import program
from tests.paths import ROOT
from tests.waiting import WAIT_S, wait_until

pytest.importorskip("prometheus_client")
yaml: Any = pytest.importorskip("yaml")

PAUSE_S = 0.1
"""Seconds between two questions to Prometheus."""


class Prometheus:
    """A Prometheus that scrapes these ports twice a second, and waits a second where a rule waits for minutes."""

    def __init__(self, directory: Path, ports: list[int]) -> None:
        directory.mkdir()
        rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"] if "for" in rule):
            rule["for"] = "1s"
        (directory / "alerts.yml").write_text(yaml.safe_dump(rules))
        targets = {"targets": [f"127.0.0.1:{port}" for port in ports], "labels": {"cluster": "test"}}
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": ["alerts.yml"],
            "scrape_configs": [{"job_name": "pybk", "static_configs": [targets]}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = directory / "log"
        command = [
            str(program("prometheus")),
            f"--config.file={directory}/prometheus.yml",
            f"--storage.tsdb.path={directory}/data",
            "--web.listen-address=127.0.0.1:0",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._address = ""

    def find_address(self) -> None:
        """Wait until it serves."""
        listening = re.compile(r'"Listening on" address=(\S+)')

        def ready() -> bool:
            log = self._log.read_text()
            assert self._process.poll() is None, log
            return "Server is ready" in log

        wait_until(ready, "Prometheus to start", pause_s=PAUSE_S)
        found = listening.search(self._log.read_text())
        assert found
        self._address = found[1]

    def ask(self, path: str, **parameters: str) -> Any:
        """Return what it answers."""
        with urlopen(f"http://{self._address}/api/v1/{path}?{urlencode(parameters)}", timeout=WAIT_S) as answer:
            return json.load(answer)["data"]

    def values(self, query: str) -> dict[str, float]:
        """Return the values of an expression by the label ``store``."""
        found = self.ask("query", query=query)["result"]
        return {each["metric"].get("store", ""): float(each["value"][1]) for each in found}

    def alert(self, name: str) -> list[dict[str, Any]]:
        """Return the alerts of a name that are pending or fire."""
        return [each for each in self.ask("alerts")["alerts"] if each["labels"]["alertname"] == name]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


class Bookies:
    """Three bookies that show their metrics."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._url = make_cluster(directory)
        self.children: dict[str, Child] = {}

    def start(self, name: str) -> None:
        """Start a bookie; returns before it serves."""
        arguments = [str(self._directory / name), self._url, name]
        log = self._directory / f"{name}.log"
        self.children[name] = Child(arguments, SECRET, log, module="tests.deploy.exporting_bookie")

    def port(self, name: str) -> int:
        """Wait until a bookie serves, and return where its metrics are."""
        child = self.children[name]
        return int(child.wait_for(lambda: child.said("metrics"))[-1])

    def close(self) -> None:
        """Kill all."""
        for child in self.children.values():
            child.kill()


@contextmanager
def watched(directory: Path) -> Iterator[tuple[Bookies, Prometheus]]:
    """Run three bookies, and a Prometheus that watches them."""
    with ExitStack() as stack:
        bookies = Bookies(directory / "cluster")
        stack.callback(bookies.close)
        names = [f"bookie-{number}" for number in range(3)]
        for name in names:
            bookies.start(name)
        prometheus = Prometheus(directory / "prometheus", [bookies.port(name) for name in names])
        stack.callback(prometheus.close)
        prometheus.find_address()
        yield bookies, prometheus


def leading(prometheus: Prometheus) -> list[float]:
    """Return for each bookie that was scraped whether it leads the auditor."""
    return sorted(prometheus.values("pybk_auditor_leader").values())


def test_a_real_prometheus_fires_the_alert_for_a_bookie_that_was_killed(tmp_path: Path) -> None:
    program("prometheus")
    with watched(tmp_path) as (bookies, prometheus):
        wait_until(lambda: 3.0 in prometheus.values('pybk_members{state="live"}').values(), pause_s=PAUSE_S)
        wait_until(lambda: not prometheus.alert("NoAuditor"), pause_s=PAUSE_S)
        assert not prometheus.alert("BookieDown")
        # Each bookie is scraped at its own moment: the one that leads can be seen before the others are.
        wait_until(lambda: leading(prometheus) == [0.0, 0.0, 1.0], pause_s=PAUSE_S)
        killed = next(name for name, value in prometheus.values("pybk_auditor_leader").items() if not value)
        bookies.children[killed].kill()
        wait_until(lambda: [each["state"] for each in prometheus.alert("BookieDown")] == ["firing"], pause_s=PAUSE_S)
        (alert,) = prometheus.alert("BookieDown")
        assert alert["labels"] == {"alertname": "BookieDown", "cluster": "test", "severity": "warn"}
        assert alert["annotations"]["summary"] == '1 bookies of cluster "test" do not run'
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]
        bookies.start(killed)
        wait_until(lambda: not prometheus.alert("BookieDown"), pause_s=PAUSE_S)
