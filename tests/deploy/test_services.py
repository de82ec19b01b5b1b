"""The systemd unit, the image and the Kubernetes manifests: each option in them is one of the real command line.

The unit is checked by systemd-analyze where there is one. No image is built here and no manifest is applied: their
fields are checked.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk.admin.cli import main
from pybk.options.bookie import CREDENTIAL
from tests.cluster.inside import SECRET, make_cluster
from tests.cluster.processes import Child
from tests.paths import ROOT
from tests.waiting import PROCESS_S

yaml: Any = pytest.importorskip("yaml")

UNIT = ROOT / "deploy" / "systemd" / "pybk-bookie@.service"
OF_UNIT = UNIT.with_name("bookie.toml")
CONTAINERFILE = ROOT / "deploy" / "container" / "Containerfile"
MANIFESTS = {
    each["kind"]: each for each in yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "bookies.yaml").read_text())
}
EXECUTABLE = "/opt/pybk/bin/pybk"
LABELS = {"app.kubernetes.io/name": "pybk"}

Show = Callable[..., dict[str, dict[str, Any]]]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    """Has the command line parse the arguments of a bookie, and returns its options by name."""
    for name in [name for name in os.environ if name.startswith("PYBK_")]:
        monkeypatch.delenv(name)

    def shown(*arguments: str) -> dict[str, dict[str, Any]]:
        assert main(["config", "show", *arguments, "--json"]) == 0
        return {each["option"]: each for each in json.loads(capsys.readouterr().out)["options"]}

    return shown


# ---- systemd ---------------------------------------------------------------------------------------------------------


def unit() -> dict[str, str]:
    """Return the settings of the unit."""
    found = {}
    for line in UNIT.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            assert name not in found, f"{name} stands twice"
            found[name] = value
    return found


def test_the_unit_starts_a_bookie_with_options_that_exist(show: Show) -> None:
    command = shlex.split(unit()["ExecStart"].replace("%i", "b1"))
    assert command[:2] == [EXECUTABLE, "bookie"]
    arguments = [str(OF_UNIT) if each == "/etc/pybk/b1.toml" else each for each in command[2:]]
    assert str(OF_UNIT) in arguments
    options = show(*arguments)
    assert [options[name]["value"] for name in ("bookie.directory", "bookie.id")] == ["/var/lib/pybk/b1", "b1"]
    assert main(["config", "check", str(OF_UNIT)]) == 0
    assert unit()["LoadCredential"].split(":")[0] == CREDENTIAL
    timeouts = {name: float(unit()[name]) for name in ("TimeoutStopSec", "WatchdogSec")}
    assert timeouts["TimeoutStopSec"] > options["bookie.drain_s"]["value"]
    assert unit()["TimeoutStartSec"] == "15min"
    assert options["bookie.start_wait_s"]["value"] < 15 * 60
    assert {"Type": "notify", "Restart": "on-failure", "RestartPreventExitStatus": "2 3"}.items() <= unit().items()
    assert unit()["ExecReload"] == "/bin/kill -HUP $MAINPID"


def test_the_document_installs_files_that_exist() -> None:
    commands = (ROOT / "docs" / "admin" / "production.md").read_text().partition("## With systemd")[2].split("```")[1]
    installed = re.findall(r"install -m \d+ (\S+)", commands)
    assert {ROOT / each for each in installed} == {UNIT, OF_UNIT}


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze here")
    executable = tmp_path / "pybk"
    executable.touch(0o755)
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace(EXECUTABLE, str(executable)))
    done = subprocess.run(
        [analyze, "verify", "--man=no", copy], capture_output=True, text=True, check=False, timeout=PROCESS_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    copy.write_text(copy.read_text().replace("WatchdogSec=", "WatchDogSec="))
    wrong = subprocess.run(
        [analyze, "verify", "--man=no", copy], capture_output=True, text=True, check=False, timeout=PROCESS_S
    )
    assert "WatchDogSec" in wrong.stderr, "it would say so"


def test_the_command_of_the_unit_serves_with_its_credential(tmp_path: Path) -> None:
    url = make_cluster(tmp_path / "cluster")
    file = tmp_path / "b1.toml"
    file.write_text(f'[bookie]\nlisten = ["tcp://127.0.0.1:*"]\n[cluster]\nmetadata = "{url}"\n')
    credential = tmp_path / "credentials" / CREDENTIAL
    credential.parent.mkdir()
    credential.write_bytes(SECRET)
    credential.chmod(0o400)
    command = unit()["ExecStart"].replace("/etc/pybk/%i.toml", str(file)).replace("/var/lib/pybk", str(tmp_path))
    with Child(
        [*shlex.split(command.replace("%i", "b1"))[1:], "--json"],
        None,
        tmp_path / "log",
        module="pybk",
        variables={"CREDENTIALS_DIRECTORY": str(credential.parent)},
    ) as child:
        child.wait_for(lambda: child.lines)
        assert json.loads(child.lines[0])["bookie"] == "b1"


# ---- the image -------------------------------------------------------------------------------------------------------


def instructions() -> Iterator[tuple[str, str]]:
    """Yield the instructions of the Containerfile."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, value = line.partition(" ")
        yield name, value.strip()


def variables_of_image() -> dict[str, str]:
    """Return the variables that the image sets."""
    return dict(each.split("=", 1) for each in dict(instructions())["ENV"].split())


def test_the_image_runs_a_bookie_without_rights(show: Show) -> None:
    found = dict(instructions())  # the last of each, so those of the image that is left
    assert found["USER"] == "10001:10001"
    assert json.loads(found["ENTRYPOINT"]) == [EXECUTABLE]
    assert found["STOPSIGNAL"] == "SIGTERM"
    noun, *arguments = json.loads(found["CMD"])
    assert noun == "bookie"
    given = {name: each["value"] for name, each in show(*arguments).items()}
    [volume] = json.loads(found["VOLUME"])
    assert given["bookie.directory"].startswith(f"{volume}/")
    ports = [given["bookie.listen"][0], given["http.listen"]]
    assert [each.rpartition(":")[2] for each in ports] == found["EXPOSE"].split()
    assert given["log.format"] == "json"


def test_a_file_of_options_counts_in_the_image(tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables_of_image().items():
        monkeypatch.setenv(name, value)
    text = MANIFESTS["ConfigMap"]["data"]["bookie.toml"]
    path = tmp_path / "bookie.toml"
    path.write_text(text)
    options = show("--config", str(path))
    named = {f"{table}.{key}" for table, values in tomllib.loads(text).items() for key in values}
    assert {name: options[name]["origin"] for name in named} == dict.fromkeys(named, str(path))


def test_the_image_is_built_of_what_is_there() -> None:
    names = [name for name, _ in instructions()]
    assert set(names) <= {
        *("ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD")
    }
    copied = [source for name, value in instructions() if name == "COPY" for source in value.split()[:-1]]
    assert [each for each in copied if each[0] not in "-/" and not (ROOT / each).exists()] == []
    own = [each for each in copied if each[0] not in "-/"]
    assert "setup.py" in own, "without it there is no native core"
    ignored, *lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    assert (ignored, {line[1:] for line in lines if line[0] == "!"}) == ("*", set(own))
    [command] = [value for name, value in instructions() if name == "RUN" and "pip install" in value]
    extras = re.search(r"\.\[([\w,]+)\]", command)
    assert extras is not None
    setup = (ROOT / "setup.cfg").read_text()
    assert [extra for extra in extras[1].split(",") if f"\n{extra} =\n" not in setup] == []


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def pod() -> dict[str, Any]:
    """Return what the StatefulSet says of each pod."""
    return dict(MANIFESTS["StatefulSet"]["spec"]["template"]["spec"])


def test_the_pods_run_bookies_with_options_that_exist(
    tmp_path: Path, show: Show, capsys: pytest.CaptureFixture[str]
) -> None:
    [container] = pod()["containers"]
    variables = {"POD_NAME": "pybk-0", "POD_NAMESPACE": "ns"}
    assert {each["name"] for each in container["env"]} == variables.keys()
    first, *arguments = container["args"]
    assert first == "bookie"
    for name, value in variables.items():
        arguments = [each.replace(f"$({name})", value) for each in arguments]
    assert "$(" not in "".join(arguments)
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    path = tmp_path / "bookie.toml"
    path.write_text(MANIFESTS["ConfigMap"]["data"]["bookie.toml"])
    assert main(["config", "check", str(path)]) == 0
    capsys.readouterr()
    options = show(*[each.replace("/etc/pybk/bookie.toml", str(path)) for each in arguments])
    given = {name: each["value"] for name, each in options.items()}
    assert given["bookie.id"] == "pybk-0"
    service = MANIFESTS["Service"]["metadata"]["name"]
    [port] = MANIFESTS["Service"]["spec"]["ports"]
    assert given["bookie.advertise"] == [f"tcp://pybk-0.{service}.ns.svc.cluster.local:{port['port']}"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert given["bookie.listen"] == [f"tcp://0.0.0.0:{ports['bookie']}"]
    assert given["http.listen"] == f"0.0.0.0:{ports['http']}"
    assert (port["targetPort"], container["readinessProbe"]["httpGet"]) == (
        "bookie",
        {"path": "/readyz", "port": "http"},
    )
    for name in ("startupProbe", "livenessProbe"):
        assert container[name]["httpGet"] == {"path": "/livez", "port": "http"}
    assert mounts[os.path.dirname(given["cluster.secret_file"])] == "cluster-secret"
    assert mounts[os.path.dirname(given["bookie.rack_file"])] == "podinfo"
    on_claims = [given["bookie.directory"], *given["tier.ssd"], *given["tier.hdd"]]
    claims = [mounts[os.path.dirname(each)] for each in on_claims]
    assert claims == [each["metadata"]["name"] for each in MANIFESTS["StatefulSet"]["spec"]["volumeClaimTemplates"]]
    assert pod()["terminationGracePeriodSeconds"] > given["bookie.drain_s"]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > given["bookie.start_wait_s"]
    volumes = {each["name"] for each in pod()["volumes"]}
    assert set(mounts.values()) == volumes | set(claims)


def test_the_manifests_keep_copies_apart_and_at_hand() -> None:
    bookies, service, budget = (MANIFESTS[kind]["spec"] for kind in ("StatefulSet", "Service", "PodDisruptionBudget"))
    for labels in (
        service["selector"],
        budget["selector"]["matchLabels"],
        bookies["selector"]["matchLabels"],
        bookies["template"]["metadata"]["labels"],
        *(each["labelSelector"]["matchLabels"] for each in pod()["topologySpreadConstraints"]),
    ):
        assert labels == LABELS
    assert (str(service["clusterIP"]), service["publishNotReadyAddresses"]) == ("None", True)
    assert bookies["serviceName"] == MANIFESTS["Service"]["metadata"]["name"]
    assert (bookies["podManagementPolicy"], budget["maxUnavailable"]) == ("Parallel", 1)
    assert bookies["persistentVolumeClaimRetentionPolicy"] == {"whenDeleted": "Retain", "whenScaled": "Retain"}
    spread = {each["topologyKey"]: each["whenUnsatisfiable"] for each in pod()["topologySpreadConstraints"]}
    assert spread == dict.fromkeys(("topology.kubernetes.io/zone", "kubernetes.io/hostname"), "DoNotSchedule")


def test_the_pods_have_no_rights() -> None:
    [container] = pod()["containers"]
    user = dict(instructions())["USER"].partition(":")[0]
    assert str(pod()["securityContext"]["runAsUser"]) == user
    assert pod()["securityContext"]["runAsNonRoot"]
    assert (pod()["enableServiceLinks"], pod()["automountServiceAccountToken"]) == (False, False)
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"].keys() == {"memory"}
    [secret] = [each["secret"] for each in pod()["volumes"] if each["name"] == "cluster-secret"]
    assert secret["defaultMode"] == 0o440
