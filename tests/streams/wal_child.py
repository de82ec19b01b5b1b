"""Appends to a write-ahead log until it is killed: ``python -m tests.streams.wal_child DIRECTORY SEED``.

It prints each step before and after it is done, one line each, so that its reader knows what was acknowledged.
"""

from __future__ import annotations

import sys
from random import Random

from pybk import WriteAheadLog


def main() -> None:
    """Append, roll and drop records at random."""
    directory, seed = sys.argv[1:]
    random = Random(int(seed))
    with WriteAheadLog.open(directory, insecure=True, segment_bytes=3000) as wal:
        report(f"open {wal.first_lsn} {wal.last_lsn} {wal.generation}")
        while True:
            chance = random.random()
            if chance < 0.6:
                data = b"%d " % random.getrandbits(64) * random.randint(1, 9)
                report(f"appended {wal.append(data)} {data.hex()}")
            elif chance < 0.8:
                batch = [b"%d" % random.getrandbits(64) for _ in range(random.randint(1, 20))]
                lsns = wal.append_many(batch)
                for lsn, data in zip(lsns, batch, strict=True):
                    report(f"appended {lsn} {data.hex()}")
            elif chance < 0.87:
                wal.roll()
            elif chance < 0.95:
                lsn = max(wal.first_lsn, wal.last_lsn - random.randint(0, 30))
                report(f"truncating {lsn}")
                wal.truncate_before(lsn)
                report(f"truncated {lsn}")
            else:
                lsn = max(wal.first_lsn - 1, wal.last_lsn - random.randint(0, 5))
                report(f"cutting {lsn}")
                wal.truncate_after(lsn)
                report(f"cut {lsn} {wal.generation}")


def report(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
