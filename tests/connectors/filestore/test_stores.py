"""A `FileStore` of each kind keeps files, replaces none, and publishes once what was staged."""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path

import msgspec
import pytest

from exactlyonce.connectors.filestore import store as stores
from exactlyonce.connectors.filestore.store import FileStore, Retries, WaitingFile, WaitingFileGone, store_at
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import StoreError

on = pytest.mark.parametrize("kind", ["local", "s3", "hdfs"])
NO_RETRIES = Retries(0.0)


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FileStore:
    if kind == "local":
        url = tmp_path.as_uri()
    else:
        server = request.getfixturevalue(kind)
        url = server.url
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
    store = store_at(url, uuid.uuid4().hex)
    store.check()
    return store


@on
@pytest.mark.exhaustive(but=["local", "s3"])
def test_a_file_is_put_once(store: FileStore) -> None:
    """Once it is there, no other takes its name; folders come with their files."""
    before_ms = SystemClock().now_ms()
    assert store.put("block", b"first", "aside-1")
    assert not store.put("block", b"other", "aside-2")
    assert store.put("of/a/file", io.BytesIO(b"open"), "aside-3")
    assert not store.put("of/a/file", io.BytesIO(b"other"), "aside-4")
    assert (store.get("block"), store.get("of/a/file"), store.get("missing")) == (b"first", b"open", None)
    assert sorted(store.names_in("")) == ["block", "of"]
    assert (store.names_in("of"), store.names_in("missing")) == (["a"], [])
    (listed,) = (file for file in store.files() if file.name == "block")
    assert (listed.size, listed) == (5, store.look("block"))
    assert before_ms - 1_000 < listed.written_at_ms <= SystemClock().now_ms(), "S3 rounds to seconds"
    store.remove_all("of/a")
    store.remove(["block", "missing"])
    assert (store.names_in("of/a"), store.get("block"), store.look("block")) == ([], None, None)


@on
@pytest.mark.exhaustive(but=["local", "s3"])
def test_a_file_is_read_in_ranges(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be sought in."""
    content = bytes(range(256)) * 40
    store.put("large", content, "aside")
    monkeypatch.setattr(stores, "RANGE_BYTES", 1_000)
    found = store.look("large")
    assert found is not None
    with store.open(found) as stream:
        assert stream.read() == content
        for at in (5, 9_000, len(content) - 1, 0):
            stream.seek(at)
            assert stream.read(1_500) == content[at : at + 1_500]
        assert stream.seek(0, 2) == len(content)
    assert (store.get_range("large", len(content), 5), store.get_range("missing", 0, 5)) == (b"", None)


def staged(store: FileStore, name: str, content: bytes) -> WaitingFile:
    """A file that waits to be published as `out/<name>`."""
    file = store.create("staged", f"writer/{name}", f"out/{name}", NO_RETRIES)
    file.write(content)
    file.sync()
    file.close()
    return msgspec.structs.replace(file.waiting(1), path=f"out/{name}")


@on
@pytest.mark.exhaustive(but=["local", "s3"])
def test_a_waiting_file_is_published_once(store: FileStore) -> None:
    """Nobody sees it before; afterwards it is known as published, and another file never takes its name."""
    content = os.urandom(20 << 20)
    files = [staged(store, "large", content), staged(store, "empty", b"")]
    assert store.names_in("out") == []
    assert store.waiting("staged", files) == files
    store.publish("staged", files, files)
    assert (store.get("out/large"), store.get("out/empty")) == (content, b"")
    assert store.waiting("staged", files) == []
    store.publish("staged", files, files)
    another = staged(store, "large", b"another")
    with pytest.raises(StoreError, match=r"out/large exists, and is not the file .* Nothing was overwritten: move it"):
        store.publish("staged", [another], [another])
    assert store.get("out/large") == content
    store.remove(["out/empty"])
    with pytest.raises(WaitingFileGone):
        store.waiting("staged", files)


@on
@pytest.mark.exhaustive(but=["local", "s3"])
def test_a_check_leaves_nothing(store: FileStore) -> None:
    store.check("folder")
    store.check_publishing("folder", "probe", ".probe")
    assert [name for name in store.names_in("") if name != "folder"] == []
    assert store.names_in("folder") == []
