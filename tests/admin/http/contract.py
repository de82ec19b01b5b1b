"""Run Schemathesis against a local cluster: ``python -m tests.admin.http.contract --schemathesis PROGRAM``.

Schemathesis makes requests from the OpenAPI document, right ones and wrong ones. A response with a status of 500 or
more fails it, one that is not as the document says, and a wrong request that is answered as if it were right. It asks
the console of the cluster, at first with any names of bookies and ledgers, and then with those that exist; and the port
of one bookie. The program is in an environment of its own, ``make test-http``, because it needs much.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from pybk.admin.http.admission import CHANGES_PER_SECOND
from tests.admin.dev.local import Local, local_cluster

CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
)


def run(program: Path, url: str, token: str, options: list[str], config: str = "") -> bool:
    """Return whether the interface at a URL is as its document says; Schemathesis prints what is not."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "schemathesis.toml"
        file.write_text(config, encoding="utf-8")
        done = subprocess.run(
            [
                *(str(program), "--no-color", "--config-file", str(file), "run", f"{url}/api/v1/openapi.json"),
                *("--checks", ",".join(CHECKS), "--rate-limit", f"{CHANGES_PER_SECOND - 2}/s"),
                *(("--header", f"Authorization: Bearer {token}") if token else ()),
                *("--continue-on-failure", *options),
            ],
            check=False,
            cwd=directory,
        )
    return done.returncode == 0


def names_of(cluster: Local) -> str:
    """Return a configuration in which the names of bookies and ledgers are those of some that exist."""
    with cluster.connect() as manager, manager.create_ledger(password=b"p") as writer:
        writer.append(b"entry")
    return f'[parameters]\n"path.name" = "b1"\n"path.ledger_id" = {writer.ledger_id}\n'


def main() -> int:
    """Run it; returns 1 if something is not as the document says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", type=Path, required=True, metavar="PROGRAM", help="the program")
    parser.add_argument("--examples", type=int, default=30, metavar="N", help="requests for each route, at most")
    parser.add_argument("--seed", type=int, default=1, help="of the requests")
    parsed = parser.parse_args()
    program = parsed.schemathesis.absolute()
    options = [f"--max-examples={parsed.examples}", f"--seed={parsed.seed}"]
    with TemporaryDirectory() as directory, local_cluster(Path(directory), "3") as cluster:
        (state,) = Path(directory).glob("state/**/token")
        token = state.read_text(encoding="utf-8").strip()
        ports = {name: str(each["http"]) for name, each in cluster.status().items()}
        names = names_of(cluster)  # before a bookie is drained, whose name was found
        found = [
            run(program, ports["console"], token, options),
            run(program, ports["console"], token, options, names),
            run(program, ports["b1"], "", options),
        ]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
