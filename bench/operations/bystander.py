"""A process that answers each request with 16 KiB: ``python -m bench.operations.bystander`` prints its URL, and serves.

What a watcher costs writers while it asks this process, which has nothing to do with the cluster, it costs because both
share the machine, and not because the cluster is watched.
"""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

_BODY: Final = bytes(16 << 10)


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # the base class finds it by this name
        """Answer."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(_BODY)))
        self.end_headers()
        self.wfile.write(_BODY)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
