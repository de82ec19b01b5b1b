"""Where names lead that the reference has no entry for: to the documentation of Python, or nowhere."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from docutils import nodes

if TYPE_CHECKING:
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

_PYTHON: Final = "https://docs.python.org/3/library/"

MODULES: Final = {
    "builtins": ("list",),
    "collections.abc": (
        *("AsyncGenerator", "AsyncIterator", "Awaitable", "Callable", "Collection", "Generator", "Iterable"),
        *("Iterator", "Mapping", "MutableMapping", "Sequence"),
    ),
    "concurrent.futures": ("Future",),
    "contextvars": ("Context",),
    "datetime": ("datetime",),
    "io": ("BufferedReader",),
    "os": ("PathLike",),
    "pathlib": ("Path",),
    "ssl": ("SSLContext",),
    "threading": ("Event",),
    "typing": ("Any", "BinaryIO", "Literal", "Self", "Unpack"),
    "uuid": ("UUID",),
}
"""The names of Python's library that signatures have."""

NOWHERE: Final = {
    "aliases that are not public, and say by their names what they are": {
        *("AsgiApplication", "AttributeValue", "Headers", "Int64s", "Labels", "Quorums", "StoreOrUrl"),
    },
    "parameters of types": {"T", "H", "R", "P"},
    "classes of libraries, of which a build without a network knows nothing": {
        *("AggregateRecorder", "ApplicationRecorder", "DataError", "EnvType", "Environment", "IntegrityError"),
        *("Notification", "OperationalError", "ProcessRecorder", "StoredEvent", "Tracking"),
        *("CollectorRegistry", "DataFrame", "Metric", "SparkSession", "SparkSession.Builder"),
        *("npt.NDArray", "np.bool_", "np.int64", "pa.RecordBatch", "trace.Span"),
    },
    "arguments that only pybk itself passes": {"BookieServer"},
}
"""Names without a link, by the reason why there is none."""

_LIBRARIES: Final = ("eventsourcing.", "fsspec.", "numpy.", "opentelemetry.", "prometheus_client.", "pyspark.")
_KNOWN: Final = frozenset(name for names in NOWHERE.values() for name in names)


def elsewhere(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement) -> nodes.Node | None:
    """Return what is shown for a name without an entry; None for one that nothing is known of, which is an error."""
    target = str(node.get("reftarget", ""))
    if node.get("refdomain") != "py":
        return None
    for module, names in MODULES.items():
        name = target.removeprefix(f"{module}.").removeprefix(f"{module.rpartition('.')[2]}.")
        if name in names:
            page = "stdtypes" if module == "builtins" else module
            uri = f"{_PYTHON}{page}.html#{module}.{name}".replace("#builtins.", "#")
            return nodes.reference("", "", text, internal=False, refuri=uri, reftitle=f"{module}.{name}")
    bare = re.sub(r"^pybk\.", "", target)
    return text if bare in _KNOWN or target.startswith(_LIBRARIES) else None
