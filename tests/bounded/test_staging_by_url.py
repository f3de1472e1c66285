"""Staging in S3 (moto) and HDFS (MiniDFSCluster): what is staged comes back, faults lose nothing, leftovers go."""

from __future__ import annotations

import os
import resource
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest
from bounded import Fed, catch_up, drive
from hdfs_server import HdfsServer
from waiting import until

from exactlyonce.connectors.filestore.store import FileStore, store_at
from exactlyonce.engines.bounded import workplace as workplaces
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.bounded.unit import staging
from exactlyonce.engines.bounded.unit.staging import FrameWriter, StagedFile, StagedFiles
from exactlyonce.engines.bounded.workplace import STAGED, usable_staging, workplace
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable
from exactlyonce.testing.servers.s3 import S3Server

ON_S3 = pytest.mark.parametrize("kind", ["s3"])
ON_HDFS = pytest.mark.parametrize("kind", ["hdfs"])
ON_BOTH = pytest.mark.parametrize("kind", ["s3", "hdfs"])
Server = S3Server | HdfsServer


@pytest.fixture
def server(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    found: Server = request.getfixturevalue(kind)
    for name, value in found.env.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def shared(server: Server) -> str:
    """A staging of the test's own."""
    return f"{server.url}/{uuid.uuid4().hex}"


@pytest.fixture
def folder(shared: str) -> FileStore:
    """The same, as it is."""
    return store_at(shared, STAGED)


def names(folder: FileStore) -> list[str]:
    return sorted(file.name for file in folder.files())


def replace(folder: FileStore, name: str, content: bytes) -> None:
    """Damage a file, which no call of the seam can."""
    folder.remove([name])
    folder.put(name, content, f"aside-{uuid.uuid4().hex}")


def staged(files: str, *frames: bytes) -> StagedFile:
    """A file with frames for receivers 2 and 0, in turn."""
    writer = FrameWriter(f"{files}file", receivers=3)
    for number, frame in enumerate(frames):
        writer.write(0 if number % 2 else 2, frame, 1, number)
    file = writer.close()
    assert file is not None
    return file


def taken(file: StagedFile, receiver: int) -> list[bytes]:
    place = file.range(receiver)
    with closing(StagedFiles()) as files:
        return [body for frames in files.merged([] if place is None else [place]) for body in frames.bodies()]


def fetching() -> list[str]:
    """The threads that fetch ranges; the server's own come and go."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("staged")]


@pytest.mark.exhaustive
@ON_BOTH
def test_what_is_staged_comes_back(shared: str, folder: FileStore) -> None:
    """A range is smaller than a piece, or larger than a part of an upload, and has waited on the disk; none stays."""
    for size in (3, staging.PIECE_BYTES_MAX, 20 << 20, 40 << 20):
        big = os.urandom(size)
        with workplace(shared, "orders-7") as files:
            assert files.startswith(f"{shared}/{STAGED}/orders-7.")
            file = staged(files, b"one", b"two", big)
            assert [taken(file, receiver) for receiver in range(3)] == [[b"two"], [], [b"one", big]]
        assert names(folder) == []


@ON_S3
def test_a_file_that_vanishes_or_is_cut_short(shared: str, folder: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with workplace(shared, "orders-7") as files:
        file = staged(files, b"one", b"two", bytes(100_000))
        name = file.location.rpartition("/")[2]
        whole = folder.get(name)
        assert whole is not None
        place = file.range(2)
        assert place is not None
        damaged_start = whole[: place.start] + b"?" + whole[place.start + 1 :]
        for damaged in (whole[:-1], whole[:-1] + b"?", damaged_start, whole[: place.start], whole[:5], b"x"):
            replace(folder, name, damaged)
            with pytest.raises(ConfigError, match=r"cannot be read whole: .*nothing is lost"):
                taken(file, 2)
        replace(folder, name, whole)
        monkeypatch.setattr(staging, "PIECE_BYTES_MAX", 1_000)
        monkeypatch.setattr(staging, "PIECE_BYTES_MIN", 1_000)
        with closing(StagedFiles()) as opened:
            (frames,) = opened.merged([place])
            assert frames.entry.records == 2
            folder.remove([name])
            with pytest.raises(ConfigError, match="cannot be read whole: No such file"):
                list(frames.bodies())
            assert fetching()
        assert not fetching(), "no thread outlives the reading"


@pytest.mark.exhaustive
@ON_S3
def test_a_storage_that_is_away(server: S3Server, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again until the time is over, for a reading as for a writing."""
    monkeypatch.setattr(staging, "AWAY_TIMEOUT_S", 0.2)
    with workplace(shared, "orders-7") as files:
        file = staged(files, b"one")
        writer = FrameWriter(f"{files}more", 1)
        writer.write(0, b"two", 1)
        with server.away():
            for ask in (lambda: taken(file, 2), writer.close, lambda: usable_staging(shared)):
                with pytest.raises(StorageUnavailable, match=f"The staging folder {shared}.* does not answer"):
                    ask()
        assert taken(file, 2) == [b"one"]


@pytest.mark.exhaustive
@ON_S3
def test_the_disk_of_the_spool_is_full(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "GATHERED_BYTES_MAX", 1 << 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with workplace(shared, "orders-7") as files:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        try:
            with pytest.raises(ConfigError, match=r"cannot be kept in .* File too large.*let TMPDIR name another"):
                staged(files, bytes(4 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.exhaustive
@ON_S3
def test_only_what_the_dead_have_left_is_removed(
    shared: str, folder: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that is silent counts as dead; one that beats stays, and so does what is not ours."""
    folder.check()
    folder.put("of-a-team", b"data", "aside-1")
    left = f"orders-7.{'0' * 16}."
    for name in ("beat-0", "output-out-0.1-0", "more.aside-0011223344556677"):
        folder.put(f"{left}{name}", b"x", f"{left}aside")
    with workplace(shared, "next"):
        assert f"{left}beat-0" in names(folder)
    monkeypatch.setattr(workplaces, "SILENCE_S", -1)
    with workplace(shared, "next") as files:
        (beat,) = (name for name in names(folder) if name != "of-a-team")
        assert f"{shared}/{STAGED}/{beat}".startswith(files)
    assert names(folder) == ["of-a-team"]


@pytest.mark.exhaustive
@ON_S3
def test_a_running_command_beats(shared: str, folder: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workplaces, "BEAT_S", 0.05)
    with workplace(shared, "orders-7"):
        until(lambda: any(name.endswith("beat-2") for name in names(folder)))
    assert names(folder) == []


@pytest.mark.exhaustive(but=["s3"])
@ON_BOTH
def test_catching_up(fed: Fed, loaded: Any, shared: str, folder: FileStore) -> None:
    """Staging that fails ends the command with a clear error, and with nothing visible of its checkpoint."""
    fed.feed(1_000)
    pipeline = loaded("broad")

    def cutting(stage: str, work: Sequence[bytes]) -> list[bytes]:
        answers = in_process(stage, work)
        for name in names(folder):
            if ".channel-" in name:
                replace(folder, name, (folder.get(name) or b"")[:10])
        return answers

    with pytest.raises(ConfigError, match=f"staged file {shared}.* cannot be read whole.*nothing is lost"):
        catch_up(fed, pipeline, 2, shared, submit=cutting)
    assert names(folder) == []
    assert not fed.kafka.read_committed(f"{fed.name}-out")
    summary = catch_up(fed, pipeline, 2, shared)
    fed.assert_output()
    fed.assert_state(pipeline, summary.manifest)
    fed.assert_nothing_left()
    assert names(folder) == []


@pytest.mark.exhaustive
@ON_S3
def test_a_killed_driver(
    fed: Fed, loaded: Any, shared: str, folder: FileStore, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next command goes on, and removes what the killed one has staged once it has been silent."""
    fed.feed(3_000)
    assert drive(fed, shared, "advance-computed", tmp_path / "fired") == -9
    assert names(folder)
    monkeypatch.setattr(workplaces, "SILENCE_S", -1)
    pipeline = loaded("broad")
    summary = catch_up(fed, pipeline, 3, shared)
    fed.assert_output()
    fed.assert_state(pipeline, summary.manifest)
    fed.assert_nothing_left()
    assert names(folder) == []


@contextmanager
def quota(server: HdfsServer, shared: str, space: str) -> Iterator[None]:
    """The folder of *shared* may take no more *space*."""
    path = shared.removeprefix(server.url)
    server.admin("-setSpaceQuota", space, path)
    try:
        yield
    finally:
        server.admin("-clrSpaceQuota", path)


@pytest.mark.exhaustive
@ON_HDFS
def test_a_staging_that_is_full(
    server: HdfsServer, fed: Fed, loaded: Any, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "AWAY_TIMEOUT_S", 0.2)
    fed.feed(1_000)
    pipeline = loaded("broad")
    usable_staging(shared)
    with quota(server, shared, "1k"), pytest.raises(StorageUnavailable, match="is full: make room there"):
        catch_up(fed, pipeline, 2, shared)
    with suppress(StorageUnavailable):
        usable_staging(shared)
    summary = catch_up(fed, pipeline, 2, shared)
    fed.assert_output()
    fed.assert_state(pipeline, summary.manifest)
