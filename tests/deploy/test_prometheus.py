"""A real Prometheus that scrapes a local cluster as ``pybk dev`` says, and has the alert rules."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.admin.dev.local import Local, local_cluster
from tests.deploy.programs import program
from tests.paths import ROOT
from tests.waiting import WAIT_S, wait_until

pytest.importorskip("prometheus_client")
yaml: Any = pytest.importorskip("yaml")

PAUSE_S = 0.1
"""Seconds between two questions to Prometheus."""


class Prometheus:
    """A Prometheus that scrapes twice a second, and waits a second where a rule waits for minutes.

    Args:
        directory: Where its files are.
        scrapes: The configuration of what it scrapes.
    """

    def __init__(self, directory: Path, scrapes: dict[str, Any]) -> None:
        directory.mkdir()
        rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"] if "for" in rule):
            rule["for"] = "1s"
        (directory / "alerts.yml").write_text(yaml.safe_dump(rules))
        config = {
            **scrapes,
            "global": {"evaluation_interval": "500ms"},
            "rule_files": ["alerts.yml"],
        }
        for each in scrapes["scrape_configs"]:
            each |= {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
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


def leading(prometheus: Prometheus) -> list[float]:
    """Return for each bookie that was scraped whether it leads the auditor."""
    return sorted(prometheus.values("pybk_auditor_leader").values())


@pytest.mark.long
def test_a_real_prometheus_fires_the_alert_for_a_bookie_that_was_killed(tmp_path: Path) -> None:
    program("prometheus")
    with local_cluster(tmp_path, "3", scaled=True) as local:
        scrapes = yaml.safe_load(local.run("dev", "status", "--prometheus"))
        with closing(Prometheus(tmp_path / "prometheus", scrapes)) as prometheus:
            prometheus.find_address()
            wait_until(lambda: 3.0 in prometheus.values('pybk_members{state="live"}').values(), pause_s=PAUSE_S)
            wait_until(lambda: not prometheus.alert("NoAuditor"), pause_s=PAUSE_S)
            assert not prometheus.alert("BookieDown")
            found = prometheus.values("up")
            assert set(found.values()) == {1.0}
            # Each bookie is scraped at its own moment: the one that leads can be seen before the others are.
            wait_until(lambda: leading(prometheus) == [0.0, 0.0, 1.0], pause_s=PAUSE_S)
            leaders = prometheus.values("pybk_auditor_leader")
            killed = next(name for name in ("b2", "b1") if not leaders[name])
            local.run("dev", "kill", killed)
            # What looks at the metadata store sees it at once, before the auditor reports it.
            wait_until(lambda: _absent(local) == [killed], pause_s=PAUSE_S)
            wait_until(
                lambda: [each["state"] for each in prometheus.alert("BookieDown")] == ["firing"], pause_s=PAUSE_S
            )
            (alert,) = prometheus.alert("BookieDown")
            assert alert["labels"] == {"alertname": "BookieDown", "cluster": "dev", "severity": "warn"}
            assert alert["annotations"]["summary"] == '1 bookies of cluster "dev" do not run'
            rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
            assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]
            local.run("dev", "start", killed)
            wait_until(lambda: not prometheus.alert("BookieDown"), pause_s=PAUSE_S)


def _absent(local: Local) -> list[str]:
    found: list[str] = json.loads(local.get("console", "/api/v1/cluster"))["cluster"]["absent"]
    return found
