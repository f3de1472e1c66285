"""A server that speaks S3's protocol, moto, in a process of its own behind a port that can go away."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from exactlyonce.testing.servers.forwarding import Forwarder

BUCKET = "checkpoints"
_SERVE = """
import time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
while True:
    time.sleep(3600)
"""


class S3Server:
    """One server with one bucket, `BUCKET`, in its memory."""

    url = f"s3://{BUCKET}"
    """The bucket's."""

    def __init__(self, *, knows_nobody: bool = False) -> None:
        """*knows_nobody*: once it has its bucket it refuses everybody's credentials."""
        env = {**os.environ, **({"INITIAL_NO_AUTH_ACTION_COUNT": "1"} if knows_nobody else {})}
        command = [sys.executable, "-c", _SERVE]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.door = Forwarder(int(self.process.stdout.readline()))
        with urllib.request.urlopen(self._request("PUT", f"/{BUCKET}")) as answer:
            assert answer.status == 200

    @property
    def env(self) -> dict[str, str]:
        """The variables that lead a client to it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.door.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret-canary",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def _request(self, method: str, path: str, content: bytes | None = None) -> urllib.request.Request:
        headers = {"Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"}
        headers["Content-Type"] = "application/octet-stream"  # else moto takes it for a form
        return urllib.request.Request(
            f"http://127.0.0.1:{self.door.port}{path}", data=content, method=method, headers=headers
        )

    def put(self, key: str, content: bytes) -> None:
        urllib.request.urlopen(self._request("PUT", f"/{BUCKET}/{key}", content)).close()

    def delete(self, key: str) -> None:
        urllib.request.urlopen(self._request("DELETE", f"/{BUCKET}/{key}")).close()

    def get(self, key: str) -> bytes:
        with urllib.request.urlopen(self._request("GET", f"/{BUCKET}/{quote(key)}")) as answer:
            content: bytes = answer.read()
        return content

    def listed(self, prefix: str = "") -> set[str]:
        """The keys of the bucket that begin with *prefix*."""
        keys: list[str] = []
        while True:
            after = f"&start-after={quote(keys[-1], safe='')}" if keys else ""
            path = f"/{BUCKET}?list-type=2&max-keys=1000&prefix={quote(prefix)}{after}"
            with urllib.request.urlopen(self._request("GET", path)) as answer:
                listing = answer.read().decode()
            keys += re.findall(r"<Key>([^<]+)</Key>", listing)
            if "<IsTruncated>true" not in listing:
                return set(keys)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """SIGSTOP: its sockets are open, and nobody answers."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Behave as if it were killed: connections end, and are refused."""
        self.door.go_away()
        try:
            yield
        finally:
            self.door.come_back()

    def close(self) -> None:
        self.door.go_away()
        self.process.kill()
        self.process.wait()
