"""The alert rules: what they name exists, and each one fires, not a step before, and resolves."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.expressions import RECORDED, VALUES, mistakes
from tests.deploy.programs import program
from tests.paths import ROOT
from tests.waiting import PROCESS_S

yaml: Any = pytest.importorskip("yaml")

FOLDER = ROOT / "deploy" / "prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
TESTS = [FOLDER / "alerts_test.yml", FOLDER / "alerts_days_test.yml"]


def run_promtool(*arguments: str | Path) -> str:
    """Run promtool, and return what it printed; the test fails with that if promtool does."""
    command = [program("promtool"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def test_the_rules_are_rules() -> None:
    assert f"SUCCESS: {len(RULES)} rules found" in run_promtool("check", "rules", FOLDER / "alerts.yml")


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_each_alert_fires_at_its_time_and_resolves(path: Path) -> None:
    assert "SUCCESS" in run_promtool("test", "rules", path)


def test_promtool_notices_an_alert_that_fires_too_late(tmp_path: Path) -> None:
    rules = (FOLDER / "alerts.yml").read_text()
    assert "for: 15m" in rules
    (tmp_path / "alerts.yml").write_text(rules.replace("for: 15m", "for: 16m"))
    tests = yaml.safe_load(TESTS[0].read_text())
    tests["tests"] = [each for each in tests["tests"] if each["name"] == "RepairStalled"]
    (tmp_path / "late_test.yml").write_text(yaml.safe_dump(tests))
    with pytest.raises(AssertionError, match="RepairStalled, time: 50m"):
        run_promtool("test", "rules", tmp_path / "late_test.yml")


def test_each_alert_is_tested_a_step_before_when_it_fires_and_when_it_resolves() -> None:
    tested = set()
    for path in TESTS:
        content = yaml.safe_load(path.read_text())
        step = minutes(content["evaluation_interval"])
        for test in content["tests"]:
            before, fires, after = test["alert_rule_test"]
            assert {each["alertname"] for each in (before, fires, after)} == {test["name"]}
            assert "exp_alerts" not in before
            assert len(fires["exp_alerts"]) == 1
            assert "exp_alerts" not in after
            assert minutes(before["eval_time"]) + step == minutes(fires["eval_time"]) < minutes(after["eval_time"])
            tested.add(test["name"])
    assert tested == set(ALERTS)


def minutes(duration: str) -> int:
    """Return a duration in minutes."""
    assert duration.endswith("m")
    return int(duration[:-1])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_expressions_name_metrics_labels_and_values_that_exist(rule: dict[str, Any]) -> None:
    assert not mistakes(rule["expr"])


def test_expressions_that_name_something_else_are_noticed() -> None:
    assert mistakes("rate(pybk_append_latency_seconds[5m])") == ["there is no metric pybk_append_latency_seconds"]
    assert mistakes('pybk_members{status="lost"}') == ["pybk_members has no label status"]
    assert mistakes('pybk_members{state=~"lost|gone"}') == ["state of pybk_members is never gone"]
    assert mistakes("sum by (zone) (pybk_members)") == ["no metric here has the label zone"]
    assert mistakes('pybk_tier_bytes{kind="live"}') == ["it is not known which values kind of pybk_tier_bytes has"]
    with pytest.raises(ValueError, match=r"\w"):
        mistakes("sum by (")
    assert {"ledger_fenced", "storage_full"} <= VALUES["pybk_append_errors_total", "code"]


def test_what_is_recorded_is_listed() -> None:
    assert {rule["record"] for rule in RULES if "record" in rule} == set(RECORDED)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("page", "warn")
    assert set(alert["annotations"]) == {"summary", "description", "runbook"}
    assert "$labels." in alert["annotations"]["summary"]
    assert alert["annotations"]["runbook"] == f"docs/admin/runbooks.md#{name.lower()}"


def test_the_document_explains_each_alert() -> None:
    rows = re.findall(
        r"^\| <a id=\"(\w+)\"></a>`(\w+)` \| (page|warn) \| (.+?) \| (.+?) \| (.+?) \| (.+) \|$",
        (ROOT / "docs" / "admin" / "alerts.md").read_text(),
        re.M,
    )
    assert [(anchor, name, severity) for anchor, name, severity, *_ in rows] == [
        (name.lower(), name, alert["labels"]["severity"]) for name, alert in ALERTS.items()
    ]
    assert {name: waits for _, name, _, _, waits, *_ in rows} == {
        name: alert.get("for", "at once") for name, alert in ALERTS.items()
    }
