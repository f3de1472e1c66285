"""Files in S3 (moto) and HDFS (MiniDFSCluster): what waits, is published, is cleaned, and may be removed by others."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest
from hdfs_server import HdfsServer
from table_rows import Total

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.connectors.filestore.s3 import S3Store
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks import FileSink
from exactlyonce.sinks.committer import CommitterContext
from exactlyonce.sinks.files import place as places
from exactlyonce.sinks.files.committer import FilesCommitter
from exactlyonce.sinks.writer import FlushedInterval, SinkFailed, SinkWriter
from exactlyonce.testing.servers.s3 import BUCKET, S3Server
from exactlyonce.testing.sink_contract.hooks import ORIGIN
from tests.sinks.files.conftest import Target, stage


class Files:
    """A target in S3 or HDFS, read by a client of the test's own."""

    def __init__(self, server: S3Server | HdfsServer) -> None:
        self.server, self.path = server, f"totals-{uuid.uuid4().hex}"
        self.url = f"{server.url}/{self.path}"

    def names(self) -> list[str]:
        if isinstance(self.server, S3Server):
            found = [key.removeprefix(f"{self.path}/") for key in self.server.listed(f"{self.path}/")]
        else:
            statuses = self._hdfs().list_status(f"/{self.path}", recursive=True)
            found = [status.path.removeprefix(f"/{self.path}/") for status in statuses if not status.isdir]
        return sorted(found)

    def published(self) -> list[str]:
        return [name for name in self.names() if not name.startswith(".")]

    def staged(self) -> list[str]:
        return [name for name in self.names() if "/staged/" in name]

    def get(self, name: str) -> bytes:
        if isinstance(self.server, S3Server):
            return self.server.get(f"{self.path}/{name}")
        content: bytes = self._hdfs().read(f"/{self.path}/{name}").read()
        return content

    def cents(self) -> list[int]:
        lines = (line for name in self.published() for line in self.get(name).splitlines())
        return sorted(json.loads(line)["cents"] for line in lines)

    def _hdfs(self) -> Any:
        import hdfs_native

        return hdfs_native.Client(self.server.url)


@pytest.fixture
def files(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Files:
    server = request.getfixturevalue(kind)
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return Files(server)


@pytest.fixture
def at(files: Files) -> Iterator[Callable[..., Target]]:
    """`at(**options)` is a `Target` whose sink writes to `files`."""
    made: list[Target] = []

    def make(**options: Any) -> Target:
        made.append(Target(cast(Any, files.url), **options))
        return made[-1]

    yield make
    for target in made:
        for writer in target.opened_writers:
            writer.abandon()


on = pytest.mark.parametrize("kind", ["s3", "hdfs"])
on_s3 = pytest.mark.parametrize("kind", ["s3"])


def totals(*cents: int) -> list[Total]:
    return [Total("ann", each) for each in cents]


@on
@pytest.mark.exhaustive(but=["s3"])
def test_a_file_appears_with_its_commit(files: Files, at: Callable[..., Target]) -> None:
    """Readers see nothing before it, and the same once it is repeated; neither staged files nor uploads are left."""
    target = at(partition_by=("customer",))
    committer = target.led()
    committable = target.staged(1, totals(1, 2))
    view = committer.look()
    assert view is not None
    assert [waiting.checkpoint for waiting in view.waiting] == [1]
    assert files.published() == []
    assert committer.commit([committable], 1, ORIGIN)
    (name,) = files.published()
    assert name.startswith("customer=ann/part-")
    assert [json.loads(line) for line in files.get(name).splitlines()] == [{"cents": 1}, {"cents": 2}]
    assert not target.committer().commit([committable], 1, ORIGIN)
    assert files.published() == [name]
    (entry,) = (name for name in files.names() if "/ledger/" in name)
    assert json.loads(files.get(entry))["files"][0]["path"] == name
    committer.fence(2, ORIGIN)
    committer.clean(2, 1)
    assert files.staged() == []


@on
@pytest.mark.exhaustive
@pytest.mark.parametrize("step", ["publish", "write", "forget"])
def test_a_commit_that_is_broken_off(
    step: str, kind: str, files: Files, at: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that dies before or after any of its steps is finished by another process."""
    target = at(roll_bytes=1 << 10)
    led = target.led()
    opened = target.open()
    for part in (totals(*range(100)), totals(*range(100, 200))):  # two files
        opened.writer.write(opened.encoder.encode(part))
    flushed = stage(opened, 1, []).staged
    assert flushed is not None
    committable = flushed.committable
    done: list[object] = []

    def crash(*arguments: Any, **given: Any) -> None:
        if done or step != "publish":
            raise Crash
        done.append(arguments)
        publish_one(*arguments)

    one = "_complete" if kind == "s3" else "_rename"
    publish_one = getattr(led._place.store, one)
    steps = {"publish": (led._place.store, one), "write": (led._ledger, "write"), "forget": (led._place, "forget")}
    with monkeypatch.context() as patch:
        patch.setattr(*steps[step], crash)
        with pytest.raises(Crash):
            led.commit([committable], 1, ORIGIN)
    target.committer().commit([committable], 1, ORIGIN)
    assert files.cents() == list(range(200))


class Crash(BaseException):
    """The process is gone: no handler of errors takes it."""


def uploads(files: Files) -> list[str]:
    return [upload.name for upload in S3Store(BUCKET, files.path).uploads()]


@on_s3
@pytest.mark.exhaustive
def test_abandoned_uploads(files: Files, at: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads of older attempts go at once, by their owners; without an owner by their age; a neighbour's stay."""
    monkeypatch.setattr(places, "ORPHAN_AGE_MS", 1_000_000_000_000)  # moto's uploads are of 2010
    target = at()
    committer = target.led()
    committable = target.staged(1, totals(1), attempt=1)
    target.staged(1, totals(2), attempt=2)
    neighbour = FileSink[Total](files.url, format="jsonl")
    context = CommitterContext(pipeline="other", sink="out", type=Total, blocks=cast(Any, None))
    other = neighbour.open_committer(context)
    other.check()
    other.fence(1, ORIGIN)
    foreign = S3Store(BUCKET, files.path)
    foreign.begin_upload("theirs.csv", {})
    zombie = foreign.begin_upload("part-000001.000-000-00ff-000001.jsonl", {})
    assert len(uploads(files)) == 4
    committer.clean(1, 2)
    with pytest.raises(StoreError, match=r"1\.files was set aside for checkpoint 1, .* lifecycle rule"):
        committer.commit([committable], 1, ORIGIN)
    assert len(uploads(files)) == 3
    third = target.staged(1, totals(3), attempt=2)
    (file,) = stored_files(committer, third)
    foreign.abort_upload(file.path, file.upload)
    with pytest.raises(StoreError, match=r"The upload of s3://.* was set aside for checkpoint 1, .* lifecycle rule"):
        committer.commit([third], 1, ORIGIN)
    assert foreign.has_upload("part-000001.000-000-00ff-000001.jsonl", zombie)
    monkeypatch.setattr(places, "ORPHAN_AGE_MS", 1_000)
    other.clean(9, 9)
    assert sorted(name.partition("-")[0] for name in uploads(files)) == ["part", "theirs.csv"]
    assert not foreign.has_upload("part-000001.000-000-00ff-000001.jsonl", zombie)


@on_s3
@pytest.mark.exhaustive
def test_a_lifecycle_rule_is_seen(files: Files, at: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    committer = at().led()
    folder = S3Store(BUCKET, files.path)
    rules: list[dict[str, Any]] = [
        {"ID": "old", "Status": "Disabled", "Prefix": "", "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}},
        {"ID": "logs", "Status": "Enabled", "Filter": {"Prefix": "logs/"},
         "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2}},
    ]  # fmt: skip

    def risk(*more: dict[str, Any]) -> str:
        configuration = {"Rules": [*rules, *more]}
        folder._asked("put_bucket_lifecycle_configuration", LifecycleConfiguration=configuration)
        view = committer.look()
        assert view is not None
        return view.risk

    try:
        assert risk() == ""
        every = {"ID": "all", "Status": "Enabled", "Filter": {"Prefix": ""}}
        text = risk({**every, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}})
        assert text.startswith(f"a lifecycle rule of the bucket aborts uploads in {files.url} after 7 days")
    finally:
        folder._asked("delete_bucket_lifecycle")
    view = committer.look()
    assert view is not None
    assert view.risk == ""


def stored_files(committer: FilesCommitter, committable: StoreCommittable) -> Sequence[Any]:
    from exactlyonce.sinks.files.layout import decode_body

    return committer._place.listed(decode_body(committable.body))


@on_s3
@pytest.mark.exhaustive
def test_a_storage_that_is_away(files: Files, at: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer waits for it, and goes on; a commit is refused, and repeated by the leader."""
    assert isinstance(files.server, S3Server)
    target = at()
    committer = target.led()
    committable = target.staged(1, totals(1))
    opened = target.open()
    with files.server.away():
        with pytest.raises(StoreUnavailable, match=r"The folder s3://.* does not answer"):
            committer.commit([committable], 1, ORIGIN)
        opened.writer.write(opened.encoder.encode(totals(2)))
        opened.writer.barrier(2)
        opened.writer.poll(1.0)
        assert opened.writer.take_flushed(2) is None
    later = flushed_of(opened.writer, 2).staged
    assert later is not None
    committer.commit([committable], 1, ORIGIN)
    committer.commit([msgspec.structs.replace(later.committable, previous=1)], 1, ORIGIN)
    assert files.cents() == [1, 2]


@on_s3
@pytest.mark.exhaustive
def test_a_writer_gives_up_in_the_end(files: Files, at: Callable[..., Target], monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(files.server, S3Server)
    monkeypatch.setattr(places, "AWAY_TIMEOUT_S", 0.2)
    target = at()
    target.led()
    opened = target.open()
    with files.server.away(), pytest.raises(SinkFailed, match=r"cannot write files: The folder s3://.*Nothing is lost"):
        stage(opened, 1, totals(1))


RIGHTS = {
    "s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:ListBucket", "s3:ListMultipartUploadParts",
    "s3:AbortMultipartUpload", "s3:ListBucketMultipartUploads",
}  # fmt: skip


@on_s3
@pytest.mark.exhaustive(but=["s3:PutObject-s3"])
@pytest.mark.parametrize("right", ["s3:PutObject", "s3:ListMultipartUploadParts", "s3:AbortMultipartUpload"])
def test_a_right_that_is_refused(right: str, files: Files, at: Callable[..., Target], s3_user: Any) -> None:
    """A start names it. If it is taken away later, what a commit has not done is done once it is given back."""
    target = at()
    with s3_user(*RIGHTS):
        committer = target.led()
        committable = target.staged(1, totals(1))
    with s3_user(*RIGHTS - {right}):
        said = rf"The folder {files.url}.* refuses \(.*\): give the user the right {right} there"
        with pytest.raises(StoreError, match=said):
            target.committer().check()
        if right == "s3:PutObject":
            with pytest.raises(SinkFailed, match=f"cannot write files: {said}"):
                target.staged(2, totals(2))
            with pytest.raises(StoreError, match=said):
                committer.commit([committable], 1, ORIGIN)
        else:
            with suppress(StoreError):
                committer.commit([committable], 1, ORIGIN)
    with s3_user(*RIGHTS):
        committer.commit([committable], 1, ORIGIN)
        committer.commit([target.staged(2, totals(2), previous=1)], 1, ORIGIN)
    assert files.cents() == [1, 2]


def flushed_of(writer: SinkWriter, checkpoint: int) -> FlushedInterval:
    from flushing import flushed

    return flushed(writer, checkpoint)
