"""Consumes a subscription of another process: ``python -m tests.streams.remote_consumer_child SOCKET``.

It prints the number of each record before it acknowledges it, and once more after that.
"""

from __future__ import annotations

import sys

from pybk import RemoteConsumer

if __name__ == "__main__":
    with RemoteConsumer.connect(sys.argv[1], wait=60) as consumer:
        for record in consumer:
            sys.stdout.write(f"read {record.seq}\n")
            sys.stdout.flush()
            consumer.ack(record)
            sys.stdout.write(f"acked {record.seq}\n")
            sys.stdout.flush()
