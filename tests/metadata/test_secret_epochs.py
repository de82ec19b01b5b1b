"""Two secrets of a cluster: what each opens, how values are resealed, and that a retired secret forges nothing."""

from __future__ import annotations

import pytest

from pybk.errors import MetadataForgedError, MetadataVersionError, SafetyCheckError
from pybk.feature_level import NEWEST_LEVEL
from pybk.metadata.authenticated_values import (
    VALUE_FORMAT_RESEALED,
    ValueKind,
    decode_authenticated,
    encode_authenticated,
    epoch_of,
    unchanged_since,
)
from pybk.metadata.cluster import CLUSTER_KEY, ClusterMetadata
from pybk.metadata.ledger_description import LedgerDescription
from pybk.metadata.ledgers import ledger_path
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.metadata.resealing import ResealProgress, reseal, retire, secret_status
from pybk.metadata.store import MetadataStore
from tests.metadata.harness import SimWorld, World
from tests.metadata.records import KEY, bookie, ledger

NEXT = b"n" * 32
THIRD = b"t" * 32


def opened(store: MetadataStore, *keys: bytes) -> ClusterMetadata:
    return ClusterMetadata(store, key_for=lambda identity: keys, cost=2)


def no_wait(progress: ResealProgress, written: int) -> None:
    """Do not pace the work."""


def rotated(world: SimWorld, *, retire: bool = True) -> ClusterMetadata:
    opened(world.open(), KEY)
    both = opened(world.open(), KEY, NEXT)
    both.add_secret()
    both.switch_secret()
    reseal(both, no_wait)
    if retire:
        both.retire_secret()
    return both


def test_each_step_decides_which_secret_opens_the_cluster() -> None:
    world = SimWorld()
    opened(world.open(), KEY)
    both = opened(world.open(), NEXT, KEY)
    both.add_secret()
    opened(world.open(), KEY)
    with pytest.raises(MetadataForgedError, match="does not use secret 1"):
        opened(world.open(), NEXT)
    both.switch_secret()
    opened(world.open(), NEXT)
    with pytest.raises(MetadataForgedError, match="uses secret 1 now"):
        opened(world.open(), KEY)
    both.retire_secret()
    with pytest.raises(MetadataForgedError, match="which was retired: give secret 1"):
        opened(world.open(), KEY)
    with pytest.raises(MetadataForgedError, match="not that of cluster"):
        opened(world.open(), THIRD)
    assert opened(world.open(), NEXT).secret_epochs.current == 1


def test_who_read_a_value_before_it_was_resealed_may_still_change_it() -> None:
    world = SimWorld()
    first = opened(world.open(), KEY)
    version = first.create_ledger(ledger(1))
    pointer = first.write_pointer("logs", "events", b"one", None)
    both = opened(world.open(), KEY, NEXT)
    both.add_secret()
    both.switch_secret()
    assert reseal(both, no_wait).resealed >= 2
    assert reseal(both, no_wait).resealed == 0
    node = world.open().get(f"ledgers/{ledger_path(1)}", latest=True)
    assert node is not None
    assert node.value[0] == VALUE_FORMAT_RESEALED
    assert node.version > version
    both.write_ledger(ledger(1, version=1), version)
    newer = both.write_pointer("logs", "events", b"two", pointer)
    with pytest.raises(MetadataVersionError):
        both.write_ledger(ledger(1, version=2), version)
    with pytest.raises(MetadataVersionError):
        both.write_pointer("logs", "events", b"three", pointer)
    both.delete_pointer("logs", "events", newer)


def test_leased_values_are_counted_and_written_anew_whatever_noticed_the_new_secret_first() -> None:
    world = SimWorld()
    opened(world.open(), KEY)
    holder, admin = opened(world.open(), KEY, NEXT), opened(world.open(), KEY, NEXT)
    lease = holder.try_lock("events", "a writer")
    assert lease is not None
    admin.add_secret()
    admin.switch_secret()
    reseal(admin, no_wait)
    holder.refresh_keys()  # as a thread does that meets a value of the new secret before the watch is served
    assert secret_status(admin).old_keys == ("locks/events",)
    with pytest.raises(SafetyCheckError, match="locks/events"):
        retire(admin, lambda seconds: None)
    world.server.deliver()
    assert secret_status(admin).old_values == 0
    retire(admin, lambda seconds: None)
    assert opened(world.open(), NEXT).lock_owner("events") == "a writer"
    lease.release()
    assert admin.lock_owner("events") is None


def test_what_a_running_bookie_has_recorded_of_orphans_is_resealed_on_every_store(world: World) -> None:
    opened(world.open(), KEY)
    holder, admin = opened(world.open(), KEY, NEXT), opened(world.open(), KEY, NEXT)
    holder.record_orphans(bookie(1), [5])
    admin.add_secret()
    admin.switch_secret()
    assert "orphans/bookie-1%3A3181" in secret_status(admin).old_keys
    reseal(admin, no_wait)
    assert not secret_status(admin).old_values
    assert world.wait_for(lambda: holder.secret_epochs.current == 1)
    holder.record_orphans(bookie(1), [5, 6])
    assert admin.list_orphans()[0].total == 2


def test_what_is_written_with_a_retired_secret_is_refused() -> None:
    world = SimWorld()
    both, store = rotated(world), world.open()
    key = f"ledgers/{ledger_path(7)}"
    forged = encode_authenticated(
        ValueKind.LEDGER, key, bytes(16), ledger(7).encode(), MetadataKeys.first(KEY), NEWEST_LEVEL
    )
    store.create(key, forged)
    for cluster in (both, opened(world.open(), NEXT), opened(world.open(), KEY, NEXT)):
        with pytest.raises(MetadataForgedError, match="was retired"):
            cluster.read_ledger(7)


def test_a_mac_of_one_epoch_is_none_of_another() -> None:
    """A header that names an epoch, and a MAC by the key of another one, are forged, though both keys are valid."""
    world = SimWorld()
    both, store = rotated(world, retire=False), world.open()
    key = f"ledgers/{ledger_path(7)}"
    swapped = (MetadataKeys(1, {1: KEY}), MetadataKeys(0, {0: NEXT}))
    for keys, since in ((keys, since) for keys in swapped for since in (None, 1)):
        forged = encode_authenticated(ValueKind.LEDGER, key, bytes(16), ledger(7).encode(), keys, NEWEST_LEVEL, since)
        version = store.create(key, forged)
        for cluster in (both, opened(world.open(), NEXT), opened(world.open(), KEY, NEXT)):
            with pytest.raises(MetadataForgedError, match="was not written with the cluster secret"):
                cluster.read_ledger(7)
        store.delete(key, version)


def test_resealed_values_are_of_the_current_epoch_and_need_no_older_key() -> None:
    world = SimWorld()
    made = opened(world.open(), KEY).create_ledger(ledger(1))
    both = rotated(world)
    third = opened(world.open(), NEXT, THIRD)
    third.add_secret()
    both.refresh_keys()
    third.switch_secret()
    reseal(third, no_wait)
    third.retire_secret()
    nodes = [node.value for key, node in world.open().walk() if key != CLUSTER_KEY]
    assert {epoch_of(value) for value in nodes} == {2}
    key = f"ledgers/{ledger_path(1)}"
    (value,) = [node.value for found, node in world.open().walk() if found == key]
    assert decode_authenticated(key, value, MetadataKeys(2, {2: THIRD}))[0] is ValueKind.LEDGER
    with pytest.raises(MetadataForgedError):
        decode_authenticated(key, value, MetadataKeys(2, {2: NEXT}))
    assert unchanged_since(value, 10**6) == made, "the second time, too, it is known since when it is unchanged"


def test_descriptions_of_every_epoch_are_accepted_and_those_of_strangers_refused() -> None:
    world = SimWorld()
    both = rotated(world)
    after = opened(world.open(), NEXT, THIRD)
    after.add_secret()
    after.switch_secret()
    after.retire_secret()
    assert both.keys is not None
    last = opened(world.open(), THIRD)
    for made_with in (KEY, NEXT, THIRD):
        encoded = LedgerDescription.of(ledger(7)).encode(made_with)
        assert last.check_description(encoded, where="here") == LedgerDescription.of(ledger(7))
    with pytest.raises(MetadataForgedError):
        last.check_description(LedgerDescription.of(ledger(7)).encode(b"x" * 32), where="here")


@pytest.mark.parametrize(
    ("old", "new"), [(b'"key_epoch":1', b'"key_epoch":0'), (b'"level":4', b'"level":2'), (b'"earlier":{"0":"', b"?")]
)
def test_nothing_that_the_cluster_says_of_secrets_can_be_changed_without_one(old: bytes, new: bytes) -> None:
    world = SimWorld()
    rotated(world, retire=False)
    store = world.open()
    node = store.get(CLUSTER_KEY, latest=True)
    assert node is not None
    at = node.value.index(old)
    if new == b"?":  # another wrapped key
        at += len(old)
        changed = node.value[:at] + (b"B" if node.value[at : at + 1] == b"A" else b"A") + node.value[at + 1 :]
    else:
        changed = node.value.replace(old, new)
    store.put(CLUSTER_KEY, changed, node.version)
    for keys in ((KEY, NEXT), (NEXT,), (KEY,)):
        with pytest.raises(MetadataForgedError):
            opened(world.open(), *keys)


def test_a_state_before_the_rotation_is_not_followed_by_those_who_know_better() -> None:
    world = SimWorld()
    opened(world.open(), KEY)
    store = world.open()
    before = store.get(CLUSTER_KEY, latest=True)
    assert before is not None
    both = rotated(world)
    node = store.get(CLUSTER_KEY, latest=True)
    assert node is not None
    store.put(CLUSTER_KEY, before.value, node.version)
    both.refresh_keys()
    assert both.secret_epochs.current == 1
    with pytest.raises(MetadataForgedError):
        opened(world.open(), NEXT)
