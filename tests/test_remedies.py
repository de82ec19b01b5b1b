"""A test runs each command that a text of the sources names."""

from __future__ import annotations

import re

from tests.admin import test_cli_remedies
from tests.admin.dev import test_remedies as dev
from tests.cluster import test_remedies as cluster
from tests.paths import ROOT
from tests.remedies import remedies
from tests.storage import test_remedies as storage

ELSEWHERE = {
    "admin/cli/permissions.py:_znodes": (
        "tests/metadata/test_zookeeper_access.py",
        "test_znodes_of_others_are_found_and_changed",
    ),
    "metadata/zookeeper_store.py:ZooKeeperMetadataStore._check_root": (
        "tests/metadata/test_zookeeper_access.py",
        "test_znodes_of_others_are_found_and_changed",
    ),
    "metadata/ledgers.py:DELETED_IDS_REMEDY": (
        "tests/cluster/test_folded_tombstones.py",
        "test_the_command_that_the_error_of_damaged_deleted_ids_names_lets_ledgers_be_made_again",
    ),
    "streams/ledger_list.py:_check_level": (
        "tests/streams/test_detached.py",
        "test_below_the_level_of_pages_nothing_is_adopted",
    ),
    "spark/sink/ledger_merge.py:merge_ledgers": (
        "tests/spark/sink/test_ledger_merge.py",
        "test_a_lower_feature_level_merges_nothing",
    ),
    "streams/ledger_steps.py:LedgerSteps._remedy": (
        "tests/streams/test_log_rebuild.py",
        "test_the_command_that_the_error_of_a_damaged_or_lost_record_names_makes_it_again",
    ),
    "streams/ledger_steps.py:LedgerSteps._uncounted": (
        "tests/streams/test_log_rebuild.py",
        "test_the_command_that_the_error_of_lost_records_names_lets_the_log_be_made_again",
    ),
    "admin/cli/secret.py:_next": (
        "tests/admin/test_cli_secret.py",
        "test_each_step_says_what_comes_next_and_is_refused_out_of_turn",
    ),
    "credentials.py:checked_secret": (
        "tests/test_secret.py",
        "test_the_command_that_errors_of_secrets_name_makes_one",
    ),
    "credentials.py:read_credentials": (
        "tests/test_secret.py",
        "test_the_command_that_errors_of_secrets_name_makes_one",
    ),
    "ledger/ledger_metadata.py:new_key_format": (
        "tests/test_secret.py",
        "test_the_command_that_a_lower_level_names_lets_ledgers_take_a_secret",
    ),
}
"""Texts whose commands are run by tests of what they are about."""

NO_REMEDY = {
    "admin/cli/__init__.py:HELP_OF_PROFILE": "help",
    "options/table.py:TABLE": "help",
    "spark/jobs/compact.py:compact": "what merges the logs of a store",
    "spark/sink/manifest.py:LOST_REMEDY": "what makes lost metadata again",
    "admin/cli/dev.py:_profile": "what has not made a cluster",
    "admin/dev/dev_cluster.py:DevCluster.found": "what has not made a cluster",
    "admin/dev/dev_cluster.py:DevCluster.made": "what has not made the files",
    "admin/dev/dev_cluster.py:DevCluster.locked": "what changes the cluster now",
}
"""Texts that name a command without saying to run it, and what they say of it."""


def test_each_command_that_a_text_names_is_run_by_a_test() -> None:
    parts = (
        storage.COVERED | {storage.SEAM},
        cluster.CASES.covered,
        test_cli_remedies.CASES.covered,
        frozenset(test_cli_remedies.SAME),
        dev.NAMED,
        frozenset(ELSEWHERE),
        frozenset(NO_REMEDY),
    )
    known = frozenset[str]().union(*parts)
    assert sum(map(len, parts)) == len(known), "each has one test"
    assert set(remedies("")) == known


def test_the_tests_elsewhere_exist() -> None:
    for path, name in ELSEWHERE.values():
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), (path, name)
