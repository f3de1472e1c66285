"""Savepoints as what is exported and restored."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from blank_manifest import blank_committable, blank_manifest

from exactlyonce.checkpoint.records.manifest import ChannelLog
from exactlyonce.connectors.block_files import FileStorage
from exactlyonce.connectors.filestore import local
from exactlyonce.connectors.filestore.local import LocalStore
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates
from exactlyonce.engines.runtime.cut import SubtaskBlocks, WorkerBlocks, finish
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.savepoints import exported
from exactlyonce.engines.savepoints.contents import (
    KeptEntry,
    LoopEntry,
    Saved,
    SavedLoop,
    SavedOperator,
    TopicSavepoint,
)
from exactlyonce.engines.savepoints.exported import DamagedSavepoint, ExportedSavepoint, export, remove
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable
from exactlyonce.testing.cluster import LIMIT_S


def log_of(storage: FileStorage, subtask: int, *frames: tuple[str, list[int]]) -> ChannelLog:
    blocks = storage.begin(1, 0)
    own = [
        InFlightFrame(name, BatchCodec(int).encode(Batch(each, [Coordinates(f"t{subtask}", 1, n) for n in each], None)))
        for name, each in frames
    ]
    writing = SubtaskBlocks(WorkerBlocks(blocks), 7, "task", subtask)
    log, _ = finish(writing.in_flight(own), lambda: blocks.wait(LIMIT_S))
    assert log is not None
    return log


Topic = Callable[..., TopicSavepoint]


@pytest.fixture
def of_topic(storage: FileStorage) -> Topic:
    """`of_topic(log, ...)`: checkpoint 7 with these logs."""

    def made(*logs: ChannelLog, **fields: Any) -> TopicSavepoint:
        return TopicSavepoint(blank_manifest(pipeline="totals", channel_logs=logs, **fields), storage, "cluster")

    return made


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    folder = tmp_path / "exports"
    folder.mkdir()
    return folder


@pytest.fixture
def savepoint(storage: FileStorage, of_topic: Topic) -> TopicSavepoint:
    return of_topic(log_of(storage, 0, *((f">{loop}:0", [1, 2]) for loop in "abc")))


def folder_of(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def test_what_a_barrier_has_overtaken_is_never_left_behind(storage: FileStorage, of_topic: Topic) -> None:
    log = log_of(storage, 0, (">again:0", [1, 2]), ("orders>totals:0", [3, 4, 5]))
    with pytest.raises(ConfigError, match=r"Checkpoint 7 of totals is unaligned: it holds 3 records.*Take a savepoint"):
        of_topic(log)


def test_what_goes_round_is_part_of_it(storage: FileStorage, of_topic: Topic) -> None:
    second = log_of(storage, 1, (">again:1", [1, 2]), (">later:1", [9]), (">again:1", [3]))
    savepoint = of_topic(second, log_of(storage, 0, (">again:0", [8])))
    assert savepoint.saved.loops == (SavedLoop("again", 4), SavedLoop("later", 1))
    assert list(savepoint.loop_entries("again")) == [
        LoopEntry(0, b"\x08", "t0", 1, 8), *(LoopEntry(1, bytes([number]), "t1", 1, number) for number in (1, 2, 3))
    ]  # fmt: skip
    assert list(savepoint.loop_entries("later")) == [LoopEntry(1, b"\x09", "t1", 1, 9)]


def test_no_transaction_is_exported(storage: FileStorage, of_topic: Topic, exports: Path) -> None:
    log = log_of(storage, 0, (">again:0", [1, 2]))
    committable = blank_committable(transactional_id="eo:totals:out:0:1.0:0", producer_id=471_147)
    url = export(of_topic(log, committables=(committable,)), f"file://{exports}")
    assert sorted(each.name for each in folder_of(url).iterdir()) == ["_metadata.json", "again-0.avro"]
    metadata = json.loads((folder_of(url) / "_metadata.json").read_text())
    assert metadata["saved"].keys() == set(Saved.__struct_fields__)
    for left in ("eo:totals", "471147", *(ref.key for ref in log.blocks)):
        assert left not in json.dumps(metadata)
    assert list(ExportedSavepoint.at(url).loop_entries("again")) == [
        LoopEntry(0, bytes([number]), "t0", 1, number) for number in (1, 2)
    ]


def test_every_file_that_cannot_be_read_is_named(savepoint: TopicSavepoint, exports: Path) -> None:
    url = export(savepoint, f"file://{exports}")
    folder = folder_of(url)
    (folder / "a-0.avro").unlink()
    (folder / "a-0.avro").mkdir()
    (folder / "b-0.avro").write_bytes(b"x")
    content = (folder / "c-0.avro").read_bytes()
    (folder / "c-0.avro").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    unreadable, damaged, changed = ExportedSavepoint.at(url).damage()
    assert f"{url}/a-0.avro cannot be read: Is a directory" in unreadable
    assert f"{url}/b-0.avro is damaged: it has 1 bytes" in damaged
    assert f"{url}/c-0.avro is damaged: its bytes are not those that were written" in changed


def test_a_file_has_so_many_states_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is one list in memory, so its number of states is limited, too."""
    monkeypatch.setattr(exported, "FILE_RECORDS", 10)
    states = [KeptEntry(number % 4, bytes([number]), b"\x01", 1) for number in range(25)]
    saved = Saved(
        pipeline="totals", checkpoint=7, kind="aligned", cluster_id="c", completed_at_ms=0, max_parallelism=4,
        fingerprint="", offsets=(), operators=(SavedOperator("sums"),),
    )  # fmt: skip
    found = ExportedSavepoint.at(export(Mock(saved=saved, entries=lambda _: iter(states)), f"file://{tmp_path}"))
    assert [each.entries for each in found.operator("sums").files] == [10, 10, 5]
    assert sorted(found.entries("sums")) == sorted(states)


def test_the_folder_around_savepoints_is_answered_with_them(savepoint: TopicSavepoint, exports: Path) -> None:
    """What else is there, as an export that was not finished, is left out."""
    urls = sorted(export(savepoint, f"file://{exports}") for _ in range(2))
    (exports / "totals-9-0a1b2c3d").mkdir()
    with pytest.raises(ConfigError, match="itself, but in folders of it: give the URL of one") as refused:
        ExportedSavepoint.at(f"file://{exports}")
    assert sorted(line.strip() for line in str(refused.value).splitlines()[1:]) == urls


@pytest.mark.parametrize(("before", "after"), [(b'"format":2', b'"format":1'), (b'{"format"', b'{ "format"')])
def test_metadata_is_as_it_was_written(before: bytes, after: bytes, savepoint: TopicSavepoint, exports: Path) -> None:
    url = export(savepoint, f"file://{exports}")
    metadata = folder_of(url) / exported.METADATA
    assert before in metadata.read_bytes()
    metadata.write_bytes(metadata.read_bytes().replace(before, after))
    with pytest.raises(DamagedSavepoint, match=r"_metadata.json is damaged"):
        ExportedSavepoint.at(url)


@pytest.mark.parametrize("broken_off", [False, True])
def test_a_savepoint_that_is_deleted_while_it_is_read(
    broken_off: bool, savepoint: TopicSavepoint, exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = export(savepoint, f"file://{exports}")
    found = ExportedSavepoint.at(url)
    if broken_off:
        with monkeypatch.context() as patched:
            patched.setattr(exported, "hit", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                remove(url, "totals")
        (folder_of(url) / "a-0.avro").unlink()
    else:
        remove(url, "totals")
    for read in (lambda: list(found.loop_entries("a")), found.damage):
        with pytest.raises(ConfigError, match=r"savepoint 7 of totals at .* is being deleted, or has been"):
            read()


@pytest.mark.parametrize("written", range(4))
def test_an_export_that_fills_its_disk(
    written: int, savepoint: TopicSavepoint, exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any file may find no room, the metadata too: no URL is told then."""
    write, put = local._write, list[Path]()

    def filling(path: Path, content: bytes) -> None:
        if content != b"probe":
            put.append(path)
        if len(put) > written:
            path.touch()
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(local, "_write", filling)
    monkeypatch.setattr(exported, "AWAY_TIMEOUT_S", -1.0)
    with pytest.raises(StorageUnavailable, match="is full: make room there"):
        export(savepoint, f"file://{exports}")
    assert len(put) == written + 1
    assert [*exports.iterdir()] == []


LEFT = ("again-0.avro", "again-1.avro", "aside-0123456789abcdef", "probe-41-0a1b2c3d")


def test_what_a_killed_export_has_left_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "totals-7-0a1b2c3d"
    folder.mkdir()
    for name in LEFT:
        (folder / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match="`exactlyonce savepoints delete` removes what an export has left"):
        ExportedSavepoint.at(f"file://{folder}")
    with pytest.raises(ConfigError, match="There is no savepoint at"):
        remove(f"file://{folder}", "others")
    assert len([*folder.iterdir()]) == len(LEFT)
    assert remove(f"file://{folder}", "totals") == 7
    assert not folder.exists()


@pytest.mark.parametrize(
    ("folder", "inside"),
    [
        ("totals", ()),
        ("totals-7-0a1b2c3d", ("inner",)),
        *(("totals-7-0a1b2c3d", ("again-0.avro", name)) for name in ("totals.csv", "inner", "README-1.avro.txt")),
    ],
)
def test_a_folder_that_no_export_has_left(folder: str, inside: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    for name in inside:
        (tmp_path / folder / name).mkdir()
    with pytest.raises(ConfigError, match="There is no savepoint at"):
        remove(f"file://{tmp_path}/{folder}", "totals")
    assert len([*(tmp_path / folder).iterdir()]) == len(inside)


def test_an_export_that_is_deleted_while_it_is_written(
    savepoint: TopicSavepoint, exports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, puts = LocalStore.put, list[str]()

    def deleted(self: LocalStore, name: str, content: Any, aside: str) -> bool:
        if name.startswith("_removed"):
            return put(self, name, content, aside)
        puts.append(name)
        if len(puts) == 3:
            (folder,) = exports.iterdir()
            remove(f"file://{folder}", "totals")
            folder.mkdir(exist_ok=True)  # in a bucket there are no folders
        return put(self, name, content, aside)

    monkeypatch.setattr(LocalStore, "put", deleted)
    with pytest.raises(ConfigError, match="was deleted while the export was under way"):
        export(savepoint, f"file://{exports}")
    assert [*exports.iterdir()] == []
