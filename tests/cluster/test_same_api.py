"""What the embedded store promises holds for a cluster, too: the same tests, with a bookie as the manager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from pybk.manager.ledger_manager import LedgerManager
from pybk.transport.client_links import Link
from pybk.transport.in_process import InProcessLink
from tests import test_advanced, test_manager, test_reader, test_standard_futures, test_writer
from tests.cluster.inside import inside
from tests.internals import cluster_backend_of
from tests.storage.log import test_admission

pytestmark = pytest.mark.sampled(one_in=8, using="manager")

PROMISES: Final = [
    test_writer.test_any_bytes_like_object_is_a_payload,
    test_writer.test_a_payload_may_be_changed_once_the_call_has_returned,
    test_writer.test_a_released_buffer_and_one_without_bytes_are_refused,
    test_writer.test_the_longest_payload_is_taken_and_one_byte_more_is_not,
    test_writer.test_ids_count_from_zero_whatever_appends,
    test_writer.test_threads_append_to_one_ledger_and_nothing_is_lost_or_doubled,
    test_writer.test_entries_carry_the_last_add_confirmed_and_the_length_of_their_moment,
    test_writer.test_a_sync_by_another_ledger_confirms_no_deferred_entry,
    test_writer.test_close_forces_deferred_entries,
    test_writer.test_appends_after_close_are_refused,
    test_writer.test_recovery_fences_a_live_writer_and_has_all_it_was_acknowledged,
    test_writer.test_a_fence_leaves_pipelined_appends_in_or_out_but_never_acknowledged_and_out,
    test_writer.test_deleting_ends_a_writer,
    test_writer.test_finished_appends_leave_nothing_to_the_collector_of_cycles,
    test_writer.test_repr_names_the_ledger,
    test_reader.test_both_ends_are_inclusive,
    test_reader.test_an_empty_ledger_reads_as_nothing,
    test_reader.test_entries_are_named_tuples_of_all_they_carry,
    test_reader.test_a_follower_sees_an_entry_while_the_ledger_stays_open,
    test_reader.test_waiting_costs_nothing_but_a_place,
    test_reader.test_closing_ends_followers_that_wait,
    test_reader.test_following_from_before_the_first_entry_is_refused,
    test_manager.test_metadata_of_an_open_ledger_have_its_state,
    test_manager.test_hints_and_flags_may_be_given_by_their_values,
    test_manager.test_a_wrong_password_is_refused_and_changes_nothing,
    test_manager.test_unknown_ledgers_are_refused,
    test_manager.test_arguments_that_cannot_be_are_refused_when_opening,
    test_manager.test_ledgers_are_listed_by_id_and_type,
    test_manager.test_ledgers_are_listed_with_their_metadata_in_one_pass,
    test_manager.test_arguments_of_a_listing_are_refused_at_the_call,
    test_manager.test_passwords_are_checked_without_reading,
    test_manager.test_seals_are_checked_without_reading,
    test_manager.test_system_ledgers_have_a_call_of_their_own,
    test_manager.test_numbers_of_bookies_may_be_of_numpy,
    test_manager.test_closed_readers_raise,
    test_advanced.test_advanced_entries_come_in_any_order_and_are_acknowledged_in_theirs,
    test_advanced.test_duplicates_are_refused,
    test_advanced.test_a_gap_at_close_fails_the_entries_after_it,
    test_advanced.test_advanced_and_other_ledgers_keep_to_their_own_calls,
    test_advanced.test_entries_that_wait_after_a_gap_are_bounded,
    test_advanced.test_invalid_ledger_ids_are_refused,
    test_admission.test_a_large_append_is_not_starved_by_a_flood_of_small_ones,
    test_admission.test_batches_longer_than_the_limit_and_floods_of_two_ledgers_all_proceed,
    test_admission.test_an_early_entry_that_cannot_wait_raises_the_reason,
    test_admission.test_coroutines_wait_for_space_while_the_loop_runs,
    test_admission.test_cancelling_a_coroutine_never_cancels_its_append,
    test_admission.test_a_loop_that_blocks_in_an_append_itself_is_not_waited_for,
    test_admission.test_coroutines_raise_what_the_append_raises,
    test_admission.test_appends_that_wait_for_space_fail_when_the_ledger_is_closed,
    test_standard_futures.test_asyncio_wait_returns_when_appends_are_done,
    test_standard_futures.test_asyncio_wait_returns_with_the_first,
    test_standard_futures.test_asyncio_wait_with_a_timeout_leaves_the_append_alone,
    test_standard_futures.test_every_other_tool_of_asyncio_takes_them,
    test_standard_futures.test_concurrent_futures_take_them,
    test_standard_futures.test_callbacks_given_in_a_loop_are_called_in_it,
    test_standard_futures.test_one_wake_up_a_commit_and_loop,
    test_standard_futures.test_a_closed_loop_does_not_prevent_appends,
]

globals().update({promise.__name__: promise for promise in PROMISES})


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with inside(tmp_path / "cluster") as cluster:
        yield cluster.open_bookie(3, max_entry_bytes=5000, max_outstanding_bytes=64 << 10)


def test_all_promises_are_kept_here() -> None:
    assert len({promise.__name__ for promise in PROMISES}) == len(PROMISES), "one would hide another of its name"


def test_the_bookie_of_the_process_is_written_by_call(manager: LedgerManager) -> None:
    backend = cluster_backend_of(manager)
    own = next(each.bookie for each in manager.bookies() if each.bookie.bookie_id == "bookie-3")
    with manager.create_ledger(insecure=True, ensemble_size=3, write_quorum=3, ack_quorum=3) as writer:
        assert writer.append_many([b"one", b"two"]) == range(2)
        assert own in manager.ledger_metadata(writer.ledger_id).fragments[0].ensemble, "the local bookie is preferred"
    with manager.open_ledger(writer.ledger_id) as reader:
        assert [entry.payload for entry in reader] == [b"one", b"two"]
    links = {bookie: type(link) for bookie, (link, _) in backend.wire.by_bookie.items()}
    assert links.pop(own) is InProcessLink
    assert set(links.values()) == {Link}
