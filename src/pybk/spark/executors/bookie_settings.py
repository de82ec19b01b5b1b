"""The settings of executors' bookies, as they travel to executors; every worker imports this module."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Self

from pybk.credentials import CLUSTER_SECRET, Secret, cut_value
from pybk.errors import UsageError

_LINGER_SECONDS_MAX: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieSettings:
    """The settings of the bookies of executors, without secrets.

    Attributes:
        metadata: The URL of the cluster's metadata.
        directory: The directory on each host that contains the bookies' directories.
        secret_file: A file on each host with the cluster's secret; None for the secret in the environment.
        rack: The rack of the bookies.
        linger_s: Seconds for which a bookie continues to serve after its executor has ended.
        options: The texts of further options, by their names in ``configuration.py``.
    """

    metadata: str
    directory: str
    secret_file: str | None = None
    rack: str = ""
    linger_s: float = 0.0
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raise UsageError if a value is not valid."""
        if not self.metadata.startswith(("lmdb://", "zk://")):
            raise UsageError(
                f"metadata is {cut_value(self.metadata, 200)}; it takes lmdb:///path or zk://host:port/path"
            )
        for name, path in (("directory", self.directory), ("cluster_secret_file", self.secret_file)):
            if path is not None and not os.path.isabs(path):
                raise UsageError(
                    f"{name} is {cut_value(path, 200)}; it takes an absolute path, as executors run elsewhere"
                )
        object.__setattr__(self, "directory", os.path.normpath(self.directory))
        if not 0.0 <= self.linger_s <= _LINGER_SECONDS_MAX:
            raise UsageError(f"linger_s is {self.linger_s!r}; it takes 0 to {_LINGER_SECONDS_MAX} seconds")

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the settings in a text that ``str`` wrote; raises UsageError for another text."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise UsageError(f"settings of bookies are {text!r:.200}: {error}") from error

    def __str__(self) -> str:
        """Return the settings as a text, which ``of`` reads."""
        return json.dumps(asdict(self))

    @property
    def secret(self) -> Secret:
        """The cluster's secret, from the file, or else from this process's environment."""
        return Secret(file=self.secret_file, variable=CLUSTER_SECRET)
