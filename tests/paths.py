"""Where the project and its golden files lie."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
"""The project's own folder."""
GOLDEN: Final = ROOT / "tests" / "golden"
"""Files that an earlier version wrote, which every version reads."""
