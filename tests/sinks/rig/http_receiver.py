"""A service over HTTP in a process of its own, which notes every request in a file before it answers.

It does as its `behaviour.json` says, which may change while it runs. What it has counted, `Service.counted`, leaves out
requests whose Idempotency-Key it had before, as the documentation asks of a service.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Service:
    """The service in *folder*, as a test sees it."""

    def __init__(self, folder: Path, certificate: str = "") -> None:
        """*certificate*: a file with it and its key; the service then speaks TLS."""
        self.folder, self._certificate = folder, certificate
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.behave()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def behave(self, **behaviour: Any) -> None:
        """From now on: *status*, *headers*, *text* of answers; *times*, the number of requests that get them;
        *modulus*, whose multiples among ids get 422; *delay_s* before an answer; *held*, the place of the request that
        waits for `release`."""
        new = self.folder / "new.json"
        new.write_text(json.dumps({"since": len(self.requests()), **behaviour}))
        new.rename(self.folder / "behaviour.json")

    def release(self) -> None:
        (self.folder / "released").touch()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self.folder), str(self.port), self._certificate]
        )
        from waiting import until  # not in the process of the service

        until(self._answers)

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def url(self) -> str:
        return f"http{'s' if self._certificate else ''}://127.0.0.1:{self.port}/hook"

    def requests(self) -> list[dict[str, Any]]:
        """All requests, in the order of their coming."""
        file = self.folder / "requests.jsonl"
        return [json.loads(line) for line in file.read_bytes().splitlines()] if file.exists() else []

    def taken(self) -> list[dict[str, Any]]:
        """The requests that were answered by 200, each the first time that it was."""
        first: dict[str, dict[str, Any]] = {}
        for request in self.requests():
            if request["status"] == 200:
                first.setdefault(request["key"], request)
        return list(first.values())

    def counted(self) -> list[Any]:
        """The bodies of `taken`, an array as its records."""
        bodies = [request["body"] for request in self.taken()]
        return [record for body in bodies for record in (body if isinstance(body, list) else [body])]

    def repeated(self) -> int:
        """The number of requests that came again, by their key."""
        return sum(times - 1 for times in Counter(request["key"] for request in self.requests()).values())


def main(folder: Path, port: int, certificate: str) -> None:
    lock = threading.Lock()
    notes = os.open(folder / "requests.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    file = folder / "requests.jsonl"
    place = len(file.read_bytes().splitlines())

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            nonlocal place
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                now = json.loads((folder / "behaviour.json").read_bytes())
                mine, place = place, place + 1
                status, text = self._judged(now, mine, body)
                noted = {"key": self.headers["Idempotency-Key"], "body": body, "status": status, "path": self.path}
                noted |= {"at": time.monotonic(), "headers": dict(self.headers), "method": self.command}
                os.write(notes, json.dumps(noted).encode() + b"\n")
                os.fsync(notes)
            time.sleep(now.get("delay_s", 0))
            while mine == now.get("held") and not (folder / "released").exists():
                time.sleep(0.01)
            self.send_response(status)
            for name, value in now.get("headers", {}).items() if status != 200 else ():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_PUT = do_PATCH = do_POST

        def _judged(self, now: dict[str, Any], mine: int, body: Any) -> tuple[int, str]:
            ids = {record.get("id", 1) for record in (body if isinstance(body, list) else [body])}
            if "modulus" in now and any(id % now["modulus"] == 0 for id in ids):
                return 422, f"no order {min(ids)} by {self.headers.get('Authorization')}"
            if "status" in now and mine - now["since"] < now.get("times", 1 << 60):
                return now["status"], now.get("text", "")
            return 200, ""

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            pass  # a caller was killed

    server = Server(("127.0.0.1", port), Handler)
    if certificate:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
