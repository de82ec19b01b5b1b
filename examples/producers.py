"""Many producers and a follower in one event loop: ``python producers.py STORE``.

Each producer awaits its own appends, one after the other; what all of them append meanwhile goes to the disk in one
write.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time

from pybk import LedgerManager, LedgerWriter, StorageHint

SECRET = secrets.token_bytes(32)  # nobody reads the ledger after this run; tail.py reads one that is kept
PRODUCERS = 64
ENTRIES_EACH = 200


async def produce(writer: LedgerWriter, name: int) -> None:
    """Append some entries; each is on disk before the next one is made."""
    for number in range(ENTRIES_EACH):
        await writer.append_async(f"producer {name}, entry {number}".encode())


async def follow(manager: LedgerManager, ledger_id: int) -> int:
    """Count a ledger's entries as they are confirmed, until it is closed."""
    count = 0
    async with manager.open_ledger_async(ledger_id, secret=SECRET, recover=False) as reader:
        async for _ in reader.follow_async():
            count += 1
    return count


async def run(store: str) -> None:
    """Write with all producers while one task follows."""
    async with LedgerManager.open_async(store) as manager:
        async with manager.create_ledger_async(
            secret=SECRET, ledger_type="events", storage_hints={StorageHint.NVME}
        ) as writer:
            follower = asyncio.create_task(follow(manager, writer.ledger_id))
            begin = time.perf_counter()
            await asyncio.gather(*(produce(writer, name) for name in range(PRODUCERS)))
            seconds = time.perf_counter() - begin
        total = PRODUCERS * ENTRIES_EACH
        print(f"{total} entries by {PRODUCERS} producers in {seconds:.2f} s: {total / seconds:,.0f} durable entries/s")
        print(f"the follower saw {await follower} of them")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Append with many producers, and follow them.")
    parser.add_argument("store", metavar="STORE", help="the directory of the store; made if it is missing")
    asyncio.run(run(parser.parse_args().store))
