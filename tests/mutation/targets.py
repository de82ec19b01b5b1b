"""Which modules are mutated, how often each kind is drawn, and which tests must notice."""

from __future__ import annotations

from random import Random
from typing import Final, NamedTuple

from tests.mutation.operators import Mutation, Name, is_same_code, mutations, path_of, tree_of


class ModuleGroup(NamedTuple):
    """Modules that are drawn from together.

    Attributes:
        weight: Share of the mutants, in percent.
        modules: The modules, each with the tests that touch it, the quickest first; without those that take minutes.
        simulated: Whether the simulator runs them, too.
    """

    weight: int
    modules: dict[str, tuple[str, ...]]
    simulated: bool


_MACHINES: Final = ("tests/replication",)
_REPLICAS: Final = (
    "tests/bookie/test_replicas.py",
    "tests/bookie/test_replicas_fences.py",
    "tests/bookie/test_replicas_reading.py",
    "tests/bookie/test_directory_identity.py",
    "tests/bookie/test_replicas_damage.py",
    "tests/bookie/test_replicas_hostile.py",
)
_SALVAGE: Final = ("tests/bookie/test_startup.py", "tests/client/test_limbo_repair.py")
_SERVICE: Final = (
    "tests/bookie/test_server.py",
    "tests/client/test_limbo_repair.py",
    "tests/bookie/test_hostile.py",
    "tests/cluster/test_ledgers.py",
    "tests/bookie/test_full_disk.py",
)
_KEEPER: Final = (
    "tests/bookie/test_registering.py",
    "tests/bookie/test_server.py",
    "tests/bookie/test_states.py",
    "tests/bookie/test_own_position.py",
    "tests/bookie/test_metadata_age.py",
)
_CLIENT: Final = (
    "tests/client/test_client_parts.py",
    "tests/cluster/test_ledgers.py",
    "tests/client/test_closing.py",
    "tests/client/test_driving.py",
    "tests/cluster/test_same_api.py",
)
_TREE: Final = ("tests/metadata/test_store.py", "tests/metadata/test_lost_answers.py")
_RECORDS: Final = (
    "tests/metadata/test_formats.py",
    "tests/metadata/test_lost_answers.py",
    "tests/metadata/test_ledgers.py",
    "tests/metadata/test_registration.py",
)
_SINKS: Final = ("tests/spark/sink/test_upkeep.py", "tests/spark/sink/test_manifest.py")

GROUPS: Final = (
    ModuleGroup(
        45,
        dict.fromkeys(
            (
                "replication.inflight",
                "replication.replica_check",
                "replication.bookie",
                "replication.rereplication",
                "replication.placement",
                "replication.quorum",
                "replication.reader",
                "replication.recovery",
                "replication.entry_runs",
                "replication.fragments",
                "replication.broadcast",
                "replication.writer",
            ),
            _MACHINES,
        ),
        simulated=True,
    ),
    ModuleGroup(
        15,
        {
            "bookie.local_reader": ("tests/bookie/test_local_reader.py",),
            "bookie.extent_lookup": ("tests/bookie/test_extent_lookup.py", *_REPLICAS),
            "bookie.directory_identity": ("tests/bookie/test_directory_identity.py", *_SALVAGE),
            "bookie.replica": _REPLICAS,
            "bookie.replicas": (*_REPLICAS, *_SALVAGE),
            "bookie.startup": _SALVAGE,
            "bookie.server": _SERVICE,
            "bookie.keeper": _KEEPER,
        },
        simulated=False,
    ),
    ModuleGroup(
        15,
        {
            "client.append_queue": _CLIENT,
            "client.replica_check": ("tests/client/test_client_parts.py", "tests/client/test_limbo_repair.py"),
            "threads.group_commit": ("tests/test_group_commit.py", *_CLIENT),
            "client.driver": _CLIENT,
            "client.follower": ("tests/client/test_follower.py", *_CLIENT),
            "client.backend": (
                *_CLIENT,
                "tests/client/test_limbo_repair.py",
                "tests/cluster/test_seals.py",
                "tests/bookie/test_local_reader.py",
                "tests/cluster/test_secrets.py",
                "tests/cluster/test_partitions.py",
            ),
            "client.remote_ledger": _CLIENT,
            "client.limbo_repair": ("tests/client/test_client_parts.py", *_SALVAGE),
            "client.reader": _CLIENT,
            "client.rereplication": ("tests/client/test_limbo_repair.py",),
            "client.writer": _CLIENT,
        },
        simulated=False,
    ),
    ModuleGroup(
        15,
        {
            "metadata.registration": _RECORDS,
            "metadata.cluster": ("tests/metadata/test_url.py", "tests/metadata/test_registration.py"),
            "metadata.ledgers": _RECORDS,
            "metadata.lmdb_store": ("tests/metadata/test_lmdb_store.py", *_TREE),
            "metadata.lmdb_rows": ("tests/metadata/test_formats.py", "tests/metadata/test_lmdb_store.py"),
            "metadata.locks": (*_RECORDS, "tests/metadata/test_lmdb_store.py"),
            "metadata.underreplication": _RECORDS,
            "metadata.pointers": ("tests/metadata/test_pointers.py",),
            "metadata.lost_answers": ("tests/metadata/test_lost_answers.py",),
            "metadata.store": _TREE,
            "metadata.authenticated_values": ("tests/metadata/test_formats.py", "tests/metadata/test_lost_answers.py"),
        },
        simulated=False,
    ),
    ModuleGroup(
        10,
        {
            "spark.consumers": ("tests/spark/test_consumers.py", *_SINKS),
            "spark.finished_ledgers": ("tests/spark/sink/test_sink_retention.py", "tests/spark/source/test_offsets.py"),
            "spark.sink.manifest": _SINKS,
            "spark.sink.sink_record": ("tests/spark/sink/test_sink_record.py", *_SINKS),
            "spark.sink.sink_retention": ("tests/spark/sink/test_sink_retention.py", *_SINKS),
            "spark.sink.upkeep": _SINKS,
        },
        simulated=False,
    ),
)


class Drawn(NamedTuple):
    """A mutant that was drawn."""

    name: Name
    mutation: Mutation


def group_of(module: str) -> ModuleGroup:
    """Return the group that contains a module."""
    return next(group for group in GROUPS if module in group.modules)


def draw(seed: int, count: int) -> list[Drawn]:
    """Draw mutants by operator and location: first a group by its weight, then an operator, then one of its places.

    Mutations that compile to the same code are skipped. The machines come first, because the simulator runs them, too.
    """
    random = Random(f"mutation/{seed}")
    every: list[dict[str, list[Drawn]]] = []
    for group in GROUPS:
        by_operator: dict[str, list[Drawn]] = {}
        for module in group.modules:
            for mutation in mutations(tree_of(module)):
                name = Name(module, mutation.function, mutation.operator, mutation.number)
                by_operator.setdefault(mutation.operator, []).append(Drawn(name, mutation))
        every.append(by_operator)
    result: list[list[Drawn]] = [[] for _ in GROUPS]
    while sum(map(len, result)) < count:
        (at,) = random.choices(range(len(GROUPS)), [group.weight for group in GROUPS])
        places = every[at][random.choice(sorted(every[at]))]
        taken = places.pop(random.randrange(len(places))) if places else None
        if taken is not None and not is_same_code(
            taken.mutation, path_of(taken.name.module).read_bytes(), taken.name.module
        ):
            result[at].append(taken)
    return [each for drawn in result for each in drawn]


def another(seed: int, gone: Name, drawn: list[Name]) -> Name:
    """Draw a mutant in place of one that is gone: of a larger draw, the first new one of the same modules.

    If the module has gone, too, any module will do.
    """
    groups = [group for group in GROUPS if gone.module in group.modules] or GROUPS
    modules = {module for group in groups for module in group.modules}
    count = len(drawn)
    while True:
        count *= 2
        for each in draw(seed, count):
            if each.name.module in modules and each.name not in drawn:
                return each.name
