"""The arguments of a bookie as a service, which ``pybk bookie`` and ``pybk config show`` take alike."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from pybk.options.bookie import OPTIONS, resolved
from pybk.options.settings import Setting, read_file


def settings_given(parsed: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> dict[str, Setting]:
    """Return the value of each option of a bookie, and its origin: flag, environment, file or default.

    Raises:
        UsageError: The file or the environment has a wrong name or value.
    """
    names = {option.name for option in OPTIONS}
    flags = {name: value for name, value in vars(parsed).items() if name in names}
    if parsed.path:
        flags["bookie.directory"] = parsed.path
    file = None if parsed.config is None else read_file(parsed.config, OPTIONS)
    return resolved(flags, environment, file)
