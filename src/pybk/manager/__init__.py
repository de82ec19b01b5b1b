"""The ledger manager of an application, and the writers and readers that it opens."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.manager import connect as connect
    from pybk.manager.atomic_group import AtomicGroup as AtomicGroup
    from pybk.manager.atomic_group import GroupPart as GroupPart
    from pybk.manager.ledger_manager import LedgerManager as LedgerManager
    from pybk.manager.ledger_reader import LedgerReader as LedgerReader
    from pybk.manager.ledger_reader import checked_whole as checked_whole
    from pybk.manager.opening import LockedOpening as LockedOpening
    from pybk.manager.opening import Opening as Opening
else:
    __getattr__ = deferred(
        __name__,
        {
            "atomic_group": "AtomicGroup GroupPart",
            "connect": "connect",
            "ledger_manager": "LedgerManager",
            "ledger_reader": "LedgerReader checked_whole",
            "opening": "LockedOpening Opening",
        },
    )
