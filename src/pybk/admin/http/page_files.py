"""The files of the page, in ``pybk/admin/page``: they hold no data, so everybody who may connect may read them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Final, NamedTuple

from pybk.admin.http.tags import tag_of

POLICY: Final = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The content security policy: no content of other sites, no inline content, and no frame of another site around it."""

HEADERS: Final = (
    ("Content-Security-Policy", POLICY),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("Cache-Control", "no-cache"),
)
"""The headers of each file. A browser keeps a file, and asks each time whether it has changed."""

_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/app.css": ("app.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}
"""File and type by path."""


class PageFile(NamedTuple):
    """A file of the page.

    Attributes:
        content_type: Its type.
        body: Its bytes.
        tag: Its ``ETag``.
    """

    content_type: str
    body: bytes
    tag: str


def read_page() -> dict[str, PageFile]:
    """Return the files of the page by path."""
    folder = files("pybk.admin").joinpath("page")
    found = {}
    for path, (name, content_type) in _NAMES.items():
        body = folder.joinpath(name).read_bytes()
        found[path] = PageFile(content_type, body, tag_of(body))
    return found
