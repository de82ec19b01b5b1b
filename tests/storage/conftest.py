"""What tests of the storage share."""

from __future__ import annotations

from tests.storage.page_cache import on_disk

__all__ = ["on_disk"]
