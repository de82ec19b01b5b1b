"""Python imports this module at its start where this folder is in its path: new stores derive keys cheaply.

Each program of a page is a process, which would take half a second for its first password.
"""

from pybk.ledger import keys

keys.SCRYPT_COST = 2  # type: ignore[misc]  # final for everybody but tests
