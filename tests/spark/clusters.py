"""Spark's real clusters: drivers in processes of their own, and a master and a worker of Spark's standalone mode."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.ports import free_ports
from tests.spark import archive
from tests.waiting import WAIT_S

ANSWER_S = 100.0

# A JVM that lives for seconds: its second compiler and parallel collector would take more time than they save, and
# so would checks of the bytecode of Spark's own classes.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"

# Plans that run over a few rows once take longer to compile than to interpret.
_INTERPRETED = "spark.sql.codegen.wholeStage false\nspark.sql.codegen.factoryMode NO_CODEGEN\n"


def need_spark() -> Path:
    """Return where pyspark is, or skip the test."""
    if shutil.which("java") is None:
        pytest.skip("no java; install Java 17 or newer to test Spark")
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        pytest.skip("no pyspark; install the extra spark-test to test Spark")
    return Path(found.origin).parent


def home_in(directory: Path) -> Path:
    """Return a home of Spark whose processes start quickly, and leave what they write in a directory."""
    home = directory / "home"
    return home if home.exists() else make_home(directory, archive.mapping(need_spark() / "jars"))


def make_home(directory: Path, java_options: list[str]) -> Path:
    """Make a home of Spark in a directory, whose drivers' and executors' JVMs get more options."""
    home = directory / "home"
    (home / "conf").mkdir(parents=True)
    (home / "python" / "lib").mkdir(parents=True)
    spark = need_spark()
    for path in spark.iterdir():
        if path.name not in ("work", "conf", "python"):  # a local cluster's executors write to the first
            (home / path.name).symlink_to(path)
    for path in (spark / "python" / "lib").glob("py4j-*"):
        (home / "python" / "lib" / path.name).symlink_to(path)  # not pyspark.zip: each process would compile it anew
    (home / "conf" / "spark-defaults.conf").write_text(
        _INTERPRETED
        + "".join(
            f"spark.{role}.extraJavaOptions {' '.join([SHORT_LIVED, *java_options])}\n"
            f"spark.{role}.extraClassPath {archive.class_path(spark / 'jars')}\n"
            for role in ("driver", "executor")
        )
    )
    return home


def environment(directory: Path) -> dict[str, str]:
    """Return the environment of Spark's processes; the files that they leave stay in a directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYBK_", "SPARK_", "PYSPARK_"))}
    jars = need_spark() / "jars"
    return {
        **kept,
        "SPARK_HOME": str(home_in(directory)),
        "SPARK_LAUNCHER_OPTS": SHORT_LIVED,
        "SPARK_DAEMON_JAVA_OPTS": " ".join([SHORT_LIVED, *archive.mapping(jars)]),
        "SPARK_DAEMON_CLASSPATH": archive.class_path(jars),
        "SPARK_LOCAL_HOSTNAME": "localhost",
        "SPARK_LOCAL_DIRS": str(directory / "local"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "PYSPARK_PYTHON": sys.executable,
        "TMPDIR": str(directory),
    }


class Driver:
    """A driver in a process of its own.

    Attributes:
        log: What it and Spark's JVM said on their standard error.
    """

    def __init__(self, directory: Path, variables: Mapping[str, str]) -> None:
        self.log = directory / "driver.log"
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=directory,
                env={**environment(directory), **variables},
                text=True,
            )

    def ask(self, name: str, **arguments: Any) -> Any:
        """Have a function of ``tests.spark.driver`` called, and return what it returned."""
        self.send(name, **arguments)
        return self.answer()

    def send(self, name: str, **arguments: Any) -> None:
        """Have a function called; ``answer`` waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return what a function returned."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"the driver ended: {self.log.read_text()[-2000:]}"}
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def driver(directory: Path, **variables: str) -> Iterator[Driver]:
    """Have a driver until the end, with more variables in its environment."""
    found = Driver(directory, variables)
    try:
        yield found
    finally:
        found.close()


CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "WARN",
}


@contextmanager
def standalone(
    directory: Path, cores: int, hosts: Sequence[str] = ("127.0.0.1",), *, path: str | None = None
) -> Iterator[str]:
    """Run a master of Spark's and a worker on each of some addresses; yield the master's URL.

    Args:
        directory: Where they leave what they write.
        cores: The cores of each worker.
        hosts: The addresses of the workers.
        path: Another search path for the modules of executors; they find pybk and the tests without it.
    """
    variables = {**environment(directory), "SPARK_DAEMON_MEMORY": "256m"}
    if path is not None:
        variables["PYTHONPATH"] = path
    with ExitStack() as stack:
        port, web, *worker_webs = free_ports(2 + len(hosts))
        url = f"spark://127.0.0.1:{port}"
        start = str(need_spark() / "bin" / "spark-class")
        roles = [("master.Master", ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(web)])]
        for host, worker_web in zip(hosts, worker_webs, strict=True):
            size = ("--cores", str(cores), "--memory", "4g", "--work-dir", str(directory / "work" / host))
            roles.append(("worker.Worker", ["--host", host, "--webui-port", str(worker_web), *size, url]))
        for role, arguments in roles:
            with open(directory / f"{role}.log", "ab") as log:
                process = subprocess.Popen(
                    [start, f"org.apache.spark.deploy.{role}", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=variables,
                )
            stack.callback(process.wait)
            stack.callback(process.terminate)
        until = time.monotonic() + ANSWER_S
        while _workers(web) < len(hosts):
            assert time.monotonic() < until, "a worker did not come"
            time.sleep(0.1)
        yield url


def _workers(port: int) -> int:
    """Return how many workers a master has."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/", timeout=5) as answer:
            return int(json.load(answer)["aliveworkers"])
    except OSError:
        return 0
