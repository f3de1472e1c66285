"""A folder as a block storage: it keeps the contract, and a test of that misses each rule that is left out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from in_files import FileStorageContract
from waiting import until

from exactlyonce.checkpoint.block_storage import DamagedBlock, KeysWritten, Scanned
from exactlyonce.checkpoint.records.encoding import Block, BlockKey, DamagedRecord, decode
from exactlyonce.checkpoint.records.manifest import BlockRef, TopicInfo
from exactlyonce.connectors import block_files
from exactlyonce.connectors.block_files import (
    FileBlocks,
    FileStorage,
    aside,
    file_name,
    file_storage,
    name_of,
    reference,
)
from exactlyonce.connectors.filestore.local import LocalStore
from exactlyonce.connectors.filestore.store import store_at
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Fenced, StorageUnavailable
from exactlyonce.pipeline.names import NAME_LENGTH_MAX
from exactlyonce.testing.cluster import LIMIT_S
from tests.testing.conftest import Mutant

INNER = "totals/topic-1"


class TestLocalFolder(FileStorageContract):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "checkpoints"
        self.root.mkdir()

    def folder(self) -> LocalStore:
        return LocalStore(self.root, INNER)

    def names(self) -> list[str]:
        return [each.name for each in (self.root / INNER).iterdir()]

    def put_file(self, name: str, content: bytes) -> None:
        (self.root / INNER / name).write_bytes(content)

    def delete_file(self, name: str) -> None:
        (self.root / INNER / name).unlink()

    @contextmanager
    def away(self) -> Iterator[None]:
        aside = self.root.with_name("unmounted")
        self.root.rename(aside)
        yield
        aside.rename(self.root)


def test_a_full_disk(small_disk: Path) -> None:
    storage = FileStorage(LocalStore(small_disk, INNER))
    blocks = storage.begin(1, 0)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(200_000))
    ticket = blocks.write(Block("totals", 1, "state", "none", "", bytes(100_000)), 0)
    until(lambda: "is full: make room there" in blocks.waiting, meanwhile=blocks.poll)
    assert str(small_disk) in blocks.waiting
    assert not ticket.resolved
    filler.unlink()
    blocks.wait(LIMIT_S)
    assert ticket.ref is not None
    assert storage.since((0, 0)).blocks == (ticket.ref,)


def fenced(blocks: FileBlocks) -> None:
    """Raise once a put has failed: one that has begun is not taken back."""
    if blocks.waiting:
        raise Fenced("A newer instance took over.")


@pytest.mark.parametrize(
    ("wait", "error", "says"),
    [
        (lambda blocks: blocks.wait(0.2), StorageUnavailable, "1 blocks were not written to file://.* within 0 s"),
        (lambda blocks: blocks.wait(LIMIT_S, lambda: fenced(blocks)), Fenced, "A newer instance took over"),
    ],
)
def test_giving_up(wait: Callable[[FileBlocks], None], error: type[Exception], says: str, tmp_path: Path) -> None:
    storage = FileStorage(LocalStore(tmp_path, INNER), away_timeout_s=0.1)
    blocks = storage.begin(1, 0)
    inner = tmp_path / "totals"
    inner.rename(tmp_path / "aside")
    ticket = blocks.write(Block("totals", 1, "state", "none", "", b"state"), 0)
    with pytest.raises(error, match=says):
        wait(blocks)
    until(lambda: ticket.resolved, meanwhile=blocks.poll)
    (tmp_path / "aside").rename(inner)
    with pytest.raises(BrokerUnavailable, match="may not have been written"):
        _ = ticket.ref
    assert storage.since((0, 0)).blocks == ()


def test_no_thread_outlives_what_it_writes(tmp_path: Path) -> None:
    """A process that does the work of many units, one after the other, closes none of their blocks."""
    storage = FileStorage(LocalStore(tmp_path, INNER))
    for unit in range(20):
        blocks = storage.begin(1, unit)
        tickets = [blocks.write(Block("totals", 1, "state", "none", "", b"state"), group) for group in range(9)]
        blocks.wait(LIMIT_S)
        assert all(each.ref is not None for each in tickets)
    until(lambda: all(thread.name != "blocks" for thread in threading.enumerate()))


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    """It is not made: a slip in a path, or a disk that is not mounted, would be taken for a storage."""
    with pytest.raises(ConfigError, match=r"file://.*/missing does not exist: create the folder, or mount it"):
        LocalStore(tmp_path / "missing", INNER).check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["missing", "empty", "probed"])
def test_a_disk_that_is_not_mounted(folder: str, tmp_path: Path) -> None:
    """Blocks of a missing folder are away, not lost, and nothing is made. A worker that begins there leaves a probe."""
    storage = FileStorage(LocalStore(tmp_path, INNER))
    blocks = storage.begin(1, 0)
    tickets = [blocks.write(Block("totals", 1, "state", "none", "", b"state"), group) for group in range(2)]
    blocks.wait(LIMIT_S)
    refs = [each.ref for each in tickets if each.ref is not None]
    storage.check(in_use=True)
    (tmp_path / "totals").rename(tmp_path / "aside")
    if folder != "missing":
        (tmp_path / INNER).mkdir(parents=True)
    if folder == "probed":
        (tmp_path / INNER / "probe-1-0a1b2c3d").touch()
    before = sorted(tmp_path.rglob("*"))
    for asked in (lambda: storage.check(in_use=True), lambda: list(storage.fetch(refs))):
        with pytest.raises(StorageUnavailable, match="is empty or missing, though checkpoints have files there: is it"):
            asked()
    assert sorted(tmp_path.rglob("*")) == before
    storage.check()
    assert (tmp_path / INNER).is_dir()


def test_the_folder_of_a_topic(tmp_path: Path) -> None:
    """A topic's id is one part of the path, whatever is in it: HDFS refuses a path with two slashes in a row."""
    storage = file_storage(tmp_path.as_uri(), TopicInfo("totals.checkpoints", "/K2hwvq+fS8if//3pbCldB/", 2, 1))
    storage.check()
    assert [str(each.relative_to(tmp_path)) for each in tmp_path.glob("*/*")] == ["totals/_K2hwvq-fS8if__3pbCldB_"]


def test_what_a_folder_is_for(tmp_path: Path) -> None:
    missing = (tmp_path / "missing").as_uri()
    with pytest.raises(ConfigError, match=rf"^The storage {missing} does not exist"):
        store_at(missing, "totals-41-00").check()
    with pytest.raises(ConfigError, match=rf"^The checkpoint storage {missing} does not exist"):
        file_storage(missing, TopicInfo("totals.checkpoints", "id", 2, 1)).check()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / INNER).parent.mkdir()
    (tmp_path / INNER).write_text("a file where a folder is needed")
    with pytest.raises(ConfigError, match=r"topic-1 cannot be made, for a file is where a folder is needed"):
        LocalStore(tmp_path, INNER).check()


def test_removing_the_folder(tmp_path: Path) -> None:
    storage = FileStorage(LocalStore(tmp_path, INNER))
    storage.check()
    (tmp_path / "others" / "topic-1").mkdir(parents=True)
    storage.erase()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["others"]


# --- rules that are left out ------------------------------------------------------------------------------------------

SINCE, BEGIN, FETCH = FileStorage.since, FileStorage.begin, FileStorage.fetch
POLL, WAIT = FileBlocks.poll, FileBlocks.wait


def _unverified(ref: BlockRef, value: bytes, named: str) -> Block:
    try:
        return decode(value, Block)
    except DamagedRecord as error:
        raise DamagedBlock(named, ref) from error


def _own_alone(self: Any, ends: Iterable[int]) -> Scanned:
    found = SINCE(self, ends)
    return Scanned(tuple(each for each in found.blocks if each.key.startswith("block/1/")), found.end_offsets)


def _without_a_process(self: Any, incarnation: int, attempt: int) -> FileBlocks:
    blocks = BEGIN(self, incarnation, attempt)
    blocks._nonce = "0123456789ab"
    return blocks


def _failing(self: Any, timeout_s: float = 0.0) -> int:
    for put in self._unresolved if self._obstacle else ():
        put.failure = self._obstacle
    return POLL(self, timeout_s)


def _unseeing(self: Any, timeout_s: float, look: Any = None, *, left: int = 0) -> None:
    WAIT(self, timeout_s if look is None else 0.1, left=left)


def _damaged_when_away(self: Any, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
    try:
        yield from FETCH(self, refs)
    except StorageUnavailable as error:
        raise DamagedBlock(str(error), next(iter(refs))) from error


def _nothing_when_away(self: Any, ends: Iterable[int]) -> Scanned:
    try:
        return SINCE(self, ends)
    except StorageUnavailable:
        return Scanned((), tuple(ends))


MUTANTS = {
    "bytes are not compared": Mutant(
        block_files, "verified_value", _unverified, "other_bytes_than_were_written", "names by their SHA-256"),
    "what is cut off is returned": Mutant(
        block_files, "verified_value", _unverified, "a_block_that_was_cut_off", "names by their SHA-256"),
    "what is gone is left out": Mutant(
        FileStorage, "fetch", lambda self, refs: FETCH(self, [ref for ref in refs if self._got(ref) is not None]),
        "a_block_that_is_gone", "would be missing in silence"),
    "a key may be put twice":
        Mutant(KeysWritten, "add", lambda self, key: None, "a_key_is_put_once", "A key was put twice"),
    "processes share keys": Mutant(
        FileStorage, "begin", _without_a_process, "two_processes_of_one_attempt", "A block was given twice"),
    "others' orphans are not listed":
        Mutant(FileStorage, "since", _own_alone, "orphans_are_listed", "nobody remembers it"),
    "nothing is dropped":
        Mutant(FileStorage, "dropped", lambda self, refs: None, "what_is_dropped", "A dropped block is listed"),
    "nothing is erased":
        Mutant(FileStorage, "erase", lambda self: None, "erasing", "stay when the pipeline is forgotten"),
    "nobody is told what is waited for":
        Mutant(FileBlocks, "waiting", "", "a_storage_that_is_away_is_waited_for", "Nobody is told what is waited for"),
    "what is waited for is told for good": Mutant(
        FileBlocks, "waiting", "waiting for the folder", "a_storage_that_is_away_is_waited_for",
        "Nothing is waited for any more"),
    "a block fails while the storage is away": Mutant(
        FileBlocks, "poll", _failing, "a_storage_that_is_away_is_waited_for", "is waited for, by whoever writes"),
    "nobody looks while it is waited for":
        Mutant(FileBlocks, "wait", _unseeing, "who_waits_looks_meanwhile", "looks whether it is fenced"),
    "what may be left is waited for": Mutant(
        FileBlocks, "wait", lambda self, timeout_s, look=lambda: None, **_: WAIT(self, timeout_s, look),
        "who_waits_looks_meanwhile", "A newer instance took over"),
    "what is away is damaged":
        Mutant(FileStorage, "fetch", _damaged_when_away, "reading_while_it_is_away", "neither gone nor damaged"),
    "nothing is listed while it is away":
        Mutant(FileStorage, "since", _nothing_when_away, "reading_while_it_is_away", "neither gone nor damaged"),
}  # fmt: skip


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_that_is_left_out_is_missed(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = TestLocalFolder()
    contract.root, contract._to_close, contract.limit_s = tmp_path / "checkpoints", [], 0.1
    contract.root.mkdir()
    MUTANTS[rule].is_missed_by(contract, monkeypatch)
    for each in contract._to_close:
        each.close()


def test_names_of_files() -> None:
    key = BlockKey(10**17, 10**17, "o" * NAME_LENGTH_MAX, 32_767, 10**6, 10**6, "0123456789ab")
    name = file_name(key, bytes(32))
    assert len(aside(key, bytes(32))) <= 255
    assert reference(name, 7) == BlockRef(1, 0, str(key), 7, bytes(32))
    assert name_of(BlockRef(1, 0, str(key), 7, bytes(32))) == name
    assert name_of(BlockRef(1, 0, "manifest/7", 7, bytes(32))) is None
    other = reference(aside(key, bytes(32)), 7)
    assert other is not None
    assert other.key != str(key)
    for foreign in ("probe", "README", f"{name}.crc", f".{name}", name[:-1], name.upper()):
        assert reference(foreign, 7) is None
