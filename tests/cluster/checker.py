"""What must hold of a ledger after any faults: asked of the client, the metadata store and each bookie."""

from __future__ import annotations

import time
from collections.abc import Iterator

from pybk.client.remote_ledger import RemoteLedger
from pybk.ledger.digest import EntryDigest
from pybk.ledger.ledger_metadata import Bookie, LedgerMetadata, LedgerState
from pybk.manager.ledger_manager import LedgerManager
from pybk.replication.entry_runs import whole
from pybk.replication.messages import Read
from pybk.replication.quorum import Quorum
from pybk.transport.client_links import Link, Links
from pybk.transport.cluster_keys import ClusterKeys
from pybk.transport.codec import Answer
from tests.cluster.child import PASSWORD, payload
from tests.cluster.processes import Child, Cluster
from tests.internals import cluster_backend_of, descriptor_of
from tests.waiting import WAIT_S

_SETTLE_S = WAIT_S


def last_acked(writer: Child) -> int:
    """Return the last entry that a writer said was acknowledged, and check that they came in order (I15)."""
    acked = [int(said) for said in writer.said("acked")]
    assert acked == list(range(len(acked))), "acknowledgements are not in order"
    return len(acked) - 1


def last_pushed(writer: Child) -> int:
    """Return the last entry that a writer may have appended."""
    return max((int(said) for said in writer.said("pushed")), default=-1)


def check_writer(cluster: Cluster, writer: Child, *, largest: int = 400, complete: bool = True) -> LedgerMetadata:
    """Check the ledger of a writer that has ended, recovering it if nobody did."""
    (ledger_id,) = map(int, writer.said("ledger"))
    return check_ledger(cluster, ledger_id, last_acked(writer), last_pushed(writer), largest=largest, complete=complete)


def check_ledger(
    cluster: Cluster, ledger_id: int, acked: int, pushed: int, *, largest: int = 400, complete: bool = True
) -> LedgerMetadata:
    """Check one ledger.

    Args:
        cluster: The cluster.
        ledger_id: The ledger; recovered here if it is not closed.
        acked: Last entry that was acknowledged.
        pushed: Last entry that may have been appended.
        largest: As in ``Orders``.
        complete: Every bookie that runs must have its entries. Without it an ack quorum is enough: what a writer that
            was killed had sent to two bookies only stays so until somebody replicates.

    Returns:
        Its metadata, final.
    """
    with cluster.connect() as first, cluster.connect() as second:
        return check_by(cluster, (first, second), ledger_id, acked, pushed, largest=largest, complete=complete)


def check_by(
    cluster: Cluster,
    clients: tuple[LedgerManager, LedgerManager],
    ledger_id: int,
    acked: int,
    pushed: int,
    *,
    largest: int = 400,
    complete: bool = True,
) -> LedgerMetadata:
    """Check one ledger as ``check_ledger`` does, by clients that check many: the second knows nothing of the first."""
    first, second = clients
    metadata = _check_contents(first, ledger_id, acked, pushed, largest)
    check_replicas(cluster, first, ledger_id, complete=complete)
    _check_final(second, metadata)
    return metadata


def _check_contents(client: LedgerManager, ledger_id: int, acked: int, pushed: int, largest: int) -> LedgerMetadata:
    """Check what a client reads of a ledger, which it recovers if nobody did."""
    with client.open_ledger(ledger_id, password=PASSWORD) as reader:
        metadata = client.ledger_metadata(ledger_id)
        assert metadata.state is LedgerState.CLOSED
        last = metadata.last_entry_id
        assert last >= acked, f"entries {last + 1} to {acked} were acknowledged and are lost (I1)"
        assert last <= pushed, f"entries {pushed + 1} to {last} were never appended (I4)"
        found = [entry.payload for entry in reader.read(0, last)]
    assert len(found) == last + 1
    for entry_id, data in enumerate(found):
        assert data == payload(ledger_id, entry_id, largest), f"entry {entry_id} is another one (I4)"
    assert metadata.length == sum(map(len, found))
    firsts = [fragment.first_entry_id for fragment in metadata.fragments]
    assert firsts == sorted(set(firsts)), "fragments do not ascend (I5)"
    return metadata


def _check_final(client: LedgerManager, metadata: LedgerMetadata) -> None:
    """Check that a closed ledger's end does not change (I11)."""
    with client.open_ledger(metadata.ledger_id, password=PASSWORD) as reader:
        again = reader.metadata
    assert (again.state, again.last_entry_id, again.length) == (
        metadata.state,
        metadata.last_entry_id,
        metadata.length,
    )
    assert [f.first_entry_id for f in again.fragments] == [f.first_entry_id for f in metadata.fragments]


def check_replicas(cluster: Cluster, client: LedgerManager, ledger_id: int, *, complete: bool) -> None:
    """Check that every bookie that the metadata names and that runs has its entries, and that all copies agree."""
    with client.open_ledger(ledger_id, password=PASSWORD) as reader:
        ledger = descriptor_of(reader)
        assert isinstance(ledger, RemoteLedger)
        deadline = time.monotonic() + _SETTLE_S
        while wrong := list(_missing(cluster, client, ledger, complete=complete)):
            assert time.monotonic() < deadline, "\n".join(wrong[:20])
            time.sleep(0.2)


def _missing(cluster: Cluster, client: LedgerManager, ledger: RemoteLedger, *, complete: bool) -> Iterator[str]:
    """Yield what is wrong with the replicas of a closed ledger."""
    backend = cluster_backend_of(client)
    metadata = ledger.metadata
    recorded = {
        record.bookie: record.first_entry_id
        for record in backend.membership.metadata.marks()
        if record.ledger_id == ledger.ledger_id
    }
    quorum = Quorum(metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum)
    held: dict[Bookie, dict[int, bytes] | None] = {}
    for bookie in {bookie for fragment in metadata.fragments for bookie in fragment.ensemble}:
        held[bookie] = copies(cluster, client, bookie, ledger) if cluster.bookie(bookie).alive else None
    for entry_id in range(metadata.last_entry_id + 1):
        ensemble = [f.ensemble for f in metadata.fragments if f.first_entry_id <= entry_id][-1]
        found = []
        asleep = 0
        for place in quorum.write_set(entry_id):
            kept = held[ensemble[place]]
            if kept is None:
                asleep += 1
            elif entry_id in kept:
                found.append(kept[entry_id])
            elif complete and recorded.get(ensemble[place], entry_id + 1) > entry_id:
                yield f"{ensemble[place]} has no entry {entry_id}, and nobody recorded that"
        if len(set(found)) > 1:
            yield f"copies of entry {entry_id} differ (I14)"
        if len(found) + asleep < quorum.ack_quorum:
            yield f"entry {entry_id} has {len(found)} copies, and {asleep} on bookies that do not run (I3)"


def copies(cluster: Cluster, client: LedgerManager, bookie: Bookie, ledger: RemoteLedger) -> dict[int, bytes]:
    """Return the sound entries of a closed ledger that one bookie gives, each encoded."""
    found: dict[int, bytes] = {}
    metadata = ledger.metadata
    membership = cluster_backend_of(client).membership
    where = membership.find(bookie)
    if where is None:
        return found
    secret = cluster.secret
    keys = None if secret is None else ClusterKeys.derive(secret, membership.metadata.cluster_id)
    with Links(keys) as links:
        link = links.connect(bookie, *where)
        stride = 1 if metadata.ensemble_size == metadata.write_quorum else metadata.ensemble_size
        for first in range(stride):
            entry_id = first
            while entry_id <= metadata.last_entry_id:
                sound = _ask(
                    links, link, Read(ledger.ledger_id, entry_id, metadata.last_entry_id, stride, 1 << 20), ledger
                )
                found.update(sound)
                entry_id = max(sound, default=entry_id) + stride  # one that is missing may have others behind it
    return found


def _ask(links: Links, link: Link, request: Read, ledger: RemoteLedger) -> dict[int, bytes]:
    """Return the entries that a bookie answers with, encoded."""
    link.send(request.first, request, int(WAIT_S * 1e9))  # no answer of a busy machine is no missing entry
    outcomes = links.poll(1000)
    while not outcomes:
        outcomes = links.poll(1000)
    reply = outcomes[0][2]
    return dict(_sound(reply, ledger.digest)) if isinstance(reply, Answer) else {}


def _sound(answer: Answer, digest: EntryDigest) -> Iterator[tuple[int, bytes]]:
    """Yield the ids and encoded entries of an answer, each checked."""
    if answer.run is None:
        return
    body = whole(answer.run)
    start = 0
    for number, size in enumerate(answer.run.sizes):
        entry_id = answer.run.first + number * answer.run.stride
        digest.check(body, start, start + size, entry_id)
        yield entry_id, bytes(body[start : start + size])
        start += size
