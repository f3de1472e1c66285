"""S3's protocol as a block storage, on a server of moto's."""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from in_files import FileStorageContract

from exactlyonce.connectors.filestore.s3 import S3Store
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable

BUCKET = "checkpoints"


class TestS3(FileStorageContract):
    @pytest.fixture(autouse=True)
    def _prefix(self, s3: Any) -> None:
        self.server, self.prefix = s3, f"prod/{uuid.uuid4().hex}/topic-1"

    def folder(self) -> S3Store:
        return S3Store(BUCKET, self.prefix)

    def names(self) -> list[str]:
        return [each.rpartition("/")[2] for each in self.server.listed() if each.startswith(self.prefix)]

    def put_file(self, name: str, content: bytes) -> None:
        self.server.put(f"{self.prefix}/{name}", content)

    def delete_file(self, name: str) -> None:
        self.server.delete(f"{self.prefix}/{name}")

    def away(self) -> AbstractContextManager[None]:
        away: AbstractContextManager[None] = self.server.away()
        return away


@pytest.mark.exhaustive
@pytest.mark.slow
def test_more_than_a_listing_holds(s3: Any) -> None:
    """Listing and removing go on where an answer of the server ends, at a thousand files."""
    folder = S3Store(BUCKET, f"prod/{uuid.uuid4().hex}")
    names = {f"block-{number}" for number in range(1_003)}
    for name in names:
        folder.put(name, b"x", "aside")
    assert {(each.name, each.size) for each in folder.files()} == {(name, 1) for name in names}
    folder.remove(sorted(names)[1:])
    assert [each.name for each in folder.files()] == [min(names)]


def test_a_bucket_that_is_missing(s3: Any) -> None:
    with pytest.raises(ConfigError, match="There is no bucket missing-one: create it"):
        S3Store("missing-one", "prod/x").check()


def test_credentials_that_are_wrong(s3: Any) -> None:
    said = r"s3://checkpoints/prod/x refuses the credentials \(InvalidAccessKeyId\): correct AWS_ACCESS_KEY_ID"
    with s3.granting("s3:PutObject"), pytest.raises(ConfigError, match=said) as caught:
        S3Store(BUCKET, "prod/x").check()
    assert "canary" not in str(caught.value)


RIGHTS = {"s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket"}


@pytest.mark.parametrize("right", sorted(RIGHTS))
def test_a_right_that_is_missing(right: str, s3_user: Any) -> None:
    """The check asks for each of the four, and names it."""
    said = rf"{BUCKET}/prod/x refuses \(.*\): give the user the right {right} there"
    with s3_user(*RIGHTS - {right}), pytest.raises(ConfigError, match=said):
        S3Store(BUCKET, "prod/x").check()
    with s3_user(*RIGHTS):
        S3Store(BUCKET, "prod/x").check()


def test_credentials_that_are_missing(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        S3Store(BUCKET, "prod/x").check()


@pytest.mark.parametrize(
    ("bucket", "name", "value", "said"),
    [
        (
            BUCKET,
            "AWS_ENDPOINT_URL",
            "localhost:9000",
            r"its endpoint is not a URL \(Invalid endpoint: localhost:9000\)",
        ),
        (
            BUCKET,
            "AWS_ENDPOINT_URL",
            "http://localhost:port",
            "is not a URL .*`http://localhost:port`.*as http://host:port",
        ),
        (BUCKET, "AWS_ENDPOINT_URL", "http://u:canary@localhost:port", "is not a URL; write AWS_ENDPOINT_URL"),
        (BUCKET, "AWS_PROFILE", "nobody", r"profile \(nobody\) could not be found; correct AWS_PROFILE"),
        (BUCKET, "AWS_CONFIG_FILE", __file__, "Unable to parse config file: .*; correct that file, or AWS_CONFIG_FILE"),
        ("Bad_Bucket!", "AWS_REGION", "eu-west-1", "Bad_Bucket! cannot be the name of a bucket; correct the URL"),
    ],
)  # fmt: skip
def test_settings(bucket: str, name: str, value: str, said: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"^The storage s3://{bucket}/prod/x cannot be used: .*{said}") as caught:
        S3Store(bucket, "prod/x").check()
    assert "canary" not in str(caught.value)


class WithoutConditions(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(501 if "If-None-Match" in self.headers else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_DELETE = do_GET = do_PUT

    def log_message(self, format: str, *args: object) -> None: ...


def test_a_store_without_conditional_puts(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), WithoutConditions) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ConfigError, match="does not know If-None-Match"):
            S3Store(BUCKET, "prod").check()
        server.shutdown()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_server_that_is_silent(s3: Any) -> None:
    folder = S3Store(BUCKET, f"prod/{uuid.uuid4().hex}")
    folder.put("block", b"content", "aside")
    with s3.silent(), pytest.raises(StorageUnavailable, match="does not answer"):
        folder.get("block")
    assert folder.get("block") == b"content"
