"""A server that speaks S3's protocol, moto, in a process of its own behind a port that can go away."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from urllib.parse import quote

from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.testing.servers.programs import stopped


class Forwarder:
    """Forwards connections of a loopback port; while it is away they are refused, and open ones end."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open: set[socket.socket] = set()
        self.port = free_port()  # which nobody else is given while this is away
        self.come_back()

    def come_back(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def go_away(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in tuple(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            self._open |= {client, server}
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            self._open.discard(each)


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

    def __init__(self) -> None:
        command = [sys.executable, "-c", _SERVE]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
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
    def granting(self, *actions: str) -> Iterator[dict[str, str]]:
        """Let in one user alone, with the rights to *actions*, as "s3:PutObject"; gives that user's variables."""
        import boto3

        iam = boto3.client(
            "iam", "us-east-1", endpoint_url=self.env["AWS_ENDPOINT_URL"], aws_access_key_id="key",
            aws_secret_access_key="secret-canary",
        )  # fmt: skip
        name = secrets.token_hex(4)
        statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": statement})
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="rights", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        self._let_in_unknown(0)
        try:
            yield {
                **self.env,
                "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
                "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
            }
        finally:
            self._let_in_unknown(math.inf)

    def _let_in_unknown(self, requests: float) -> None:
        """Ask no credentials of so many requests."""
        urllib.request.urlopen(self._request("POST", "/moto-api/reset-auth", str(requests).encode())).close()

    def silent(self) -> AbstractContextManager[None]:
        """It takes connections, and answers nothing."""
        return stopped(self.process.pid)

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
