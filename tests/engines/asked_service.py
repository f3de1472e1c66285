"""A service over HTTP that never answers the same twice, and counts what it is asked for."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class AskedService:
    """Answers a list of ids with a list of new numbers. Every call whose number *busy* divides gets status 503; one
    with an id of *refused* gets 422. Answers are held back until `open` is set."""

    def __init__(self, *, busy: int = 0, refused: Any = ()) -> None:
        self.given: dict[int, list[int]] = defaultdict(list)
        """The numbers given for each id."""
        self.calls: list[list[int]] = []
        self.waiting_most = 0
        """The most ids that were asked for at a time."""
        self.open = threading.Event()
        self.open.set()
        self._waiting, self._number, self._lock = 0, 0, threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service._lock:
                    service.calls.append(ids)
                    call = len(service.calls)
                    service._waiting += len(ids)
                    service.waiting_most = max(service.waiting_most, service._waiting)
                service.open.wait()
                with service._lock:
                    service._waiting -= len(ids)
                    status = 422 if any(id in refused for id in ids) else 503 if busy and call % busy == 0 else 200
                    numbers = []
                    for id in ids if status == 200 else ():
                        service._number += 1
                        service.given[id].append(service._number)
                        numbers.append(service._number)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(numbers).encode())

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                pass  # a caller was killed

        self._server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
