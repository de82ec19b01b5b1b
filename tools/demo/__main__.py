"""``python -m demo [INPUT]``: write, kill, recover, prove, and print what it took."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time

from demo import cluster, embedded
from demo.source import Source
from pybk.errors import PybkError


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("input", nargs="?", help="file or folder; the standard library's source files when left out")
    parser.add_argument(
        "--directory", help="where to make the stores, which are deleted afterwards; /var/tmp when left out"
    )
    arguments = parser.parse_args()
    # /tmp is often in memory, where a sync costs nothing and shows nothing.
    place = arguments.directory or ("/var/tmp" if os.path.isdir("/var/tmp") else None)
    begin = time.perf_counter()
    try:
        source = Source.of(arguments.input)
        for number, act in enumerate((embedded, cluster), 1):
            print(f"== {number}. {act.TITLE}\n", flush=True)
            with tempfile.TemporaryDirectory(prefix="pybk-demo-", dir=place) as directory:
                act.run(directory, source)
            print()
    except (PybkError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"Done in {time.perf_counter() - begin:.1f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
