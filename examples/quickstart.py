"""The program of the README: write a ledger, read it back."""

from pybk import DigestType, LedgerManager, ReadFlag, Secret, StorageHint, WriteFlag

secret = Secret(file="secret")  # made once, and kept where only its users can read it

with LedgerManager.open("data") as manager:
    with manager.create_ledger(
        secret=secret,
        ledger_type="orders",
        storage_hints={StorageHint.NVME},
        write_flags=WriteFlag.NONE,
        digest_type=DigestType.HMAC_SHA256,
        custom_metadata={"app": b"shop"},
    ) as writer:
        entry_id = writer.append(b"first")  # on disk when it returns; ids count from 0
        future = writer.append_async(b"second")  # also awaitable
        ids = writer.append_many([b"a", b"b"])  # one batch, one sync
        print(entry_id, future.result(), list(ids))

    with manager.open_ledger(writer.ledger_id, secret=secret, read_flags=ReadFlag.DONT_CACHE) as reader:
        for entry in reader.read(0, reader.last_add_confirmed):  # both ends inclusive
            print(entry.entry_id, entry.payload)
        batch = reader.read_batch(0, max_bytes=8 << 20)  # one buffer, numpy arrays of ids and offsets, no copies
        print(len(batch), "entries in one batch")
