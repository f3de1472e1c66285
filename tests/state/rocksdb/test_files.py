"""Local files are taken again exactly where they are the restored state, and no two processes share any."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exactlyonce.pipeline.errors import ExactlyOnceError
from exactlyonce.state.chain import decode_index
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.rocksdb.backend import RocksDBBackend
from exactlyonce.state.rocksdb.files import VERSION, LocalFiles, Marker
from exactlyonce.state.rocksdb.memory import Memory
from exactlyonce.state.rocksdb.store import LocalFilesFailed
from exactlyonce.testing.contract import refused
from exactlyonce.testing.state_contract.memory import OPERATOR, StateBlocks, Subtasks, key_of

Process = Callable[..., Subtasks]
MODEL = dict.fromkeys(range(2_000), 1)
EXPECTED = {key_of(number): state for number, state in MODEL.items()}

pytestmark = pytest.mark.usefixtures("every_one_saved")


def run(process: Process) -> tuple[Subtasks, list[bytes]]:
    """A process that has written checkpoint 1, and records after it."""
    subtasks = process()
    subtasks.put(MODEL)
    indexes = subtasks.write(subtasks.freeze(1, 0))
    subtasks.put({5: 99, 3_000: 1})
    return subtasks, indexes


def folders(tmp_path: Path, beginning: str) -> list[str]:
    """The names of those in the folder of the whole key space."""
    return sorted(path.name for path in (tmp_path / OPERATOR / "0-7").iterdir() if path.name.startswith(beginning))


def test_files_of_the_restored_checkpoint(process: Process, blocks: StateBlocks) -> None:
    before, indexes = run(process)
    blocks.read.clear()
    after = process(indexes=indexes, checkpoint=1)
    assert after.items() == EXPECTED
    after.put({6: 7})
    size = blocks.size
    again = after.write(after.freeze(2, 1))
    assert blocks.read == []
    assert blocks.size - size < size / 4
    assert Subtasks(HashMapBackend(), blocks, checkpoint=2, indexes=again).items() == EXPECTED | {key_of(6): 7}
    assert before.tables[0].get(key_of(5)) == 99, "the files of a process that is alive are its own"


def test_increments_before_and_after(process: Process, blocks: StateBlocks) -> None:
    subtasks, model = process(), dict.fromkeys(range(300), 0)
    subtasks.put(model)
    subtasks.write(subtasks.freeze(1, 0))
    longest = 0
    for checkpoint in range(2, 120):
        changes = {checkpoint * 7 % 300: checkpoint, checkpoint: checkpoint}
        subtasks.put(changes)
        model |= changes
        indexes = subtasks.write(subtasks.freeze(checkpoint, checkpoint - 1))
        longest = max(longest, sum(len(decode_index(part).blocks) for part in indexes))
        subtasks = process(indexes=indexes, checkpoint=checkpoint)
    assert blocks.read == []
    assert subtasks.items() == {key_of(number): state for number, state in model.items()}
    assert longest < 40


def test_changes_that_were_noted_before(process: Process, blocks: StateBlocks, small: None) -> None:
    """Notes of an interval in files that are restored do not affect the interval of the same number."""
    subtasks = process()
    for checkpoint in (1, 2, 3):
        subtasks.put(dict.fromkeys(range(40), checkpoint))  # more than memory holds
        indexes = subtasks.write(subtasks.freeze(checkpoint, checkpoint - 1))
    after, checkpoint = process(indexes=indexes, checkpoint=3), 3
    for changes in ({1: 10}, {2: 10}, dict.fromkeys(range(20, 40), 10)):
        after.put(changes)
        checkpoint += 1
        indexes = after.write(after.freeze(checkpoint, checkpoint - 1))
    expected = {key_of(number): 10 if number in (1, 2) or number >= 20 else 3 for number in range(40)}
    assert Subtasks(HashMapBackend(), blocks, checkpoint=6, indexes=indexes).items() == expected
    assert after.items() == expected


def test_files_of_another_checkpoint(process: Process, blocks: StateBlocks) -> None:
    subtasks, indexes = run(process)
    subtasks.write(subtasks.freeze(2, 1))
    blocks.read.clear()
    after = process(indexes=indexes, checkpoint=1)
    assert after.items() == EXPECTED
    assert blocks.read == [], "those of checkpoint 1 were kept, too: it may be restored"
    third = Subtasks(HashMapBackend(), blocks, checkpoint=1, indexes=indexes)
    third.put({1: 3})
    another = third.write(third.freeze(2, 1))
    assert process(indexes=another, checkpoint=2).items() == EXPECTED | {key_of(1): 3}, "of one number, another state"
    assert blocks.read != []


def test_what_no_checkpoint_needs_is_deleted(process: Process, tmp_path: Path) -> None:
    subtasks, _ = run(process)
    for checkpoint in (2, 3, 4):
        subtasks.put({checkpoint: checkpoint})
        subtasks.write(subtasks.freeze(checkpoint, checkpoint - 1))
    assert len(folders(tmp_path, "saved-")) == 2


def scrambled(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "marker": scrambled, "CURRENT": scrambled, "MANIFEST": halved, "log CURRENT": Path.unlink, "sst": Path.unlink,
    "MANIFEST OPTIONS CURRENT log": Path.unlink, "MANIFEST OPTIONS CURRENT log sst json": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize("names", DAMAGE)
def test_files_that_were_damaged_or_deleted_in_part(
    names: str, process: Process, blocks: StateBlocks, tmp_path: Path
) -> None:
    """The blocks are read. Files are saved again if RocksDB makes an empty database of what is left."""
    _, indexes = run(process)
    (saved,) = (tmp_path / OPERATOR / "0-7").glob("saved-*")
    for path in saved.iterdir():
        if any(name in path.name for name in names.split()):
            DAMAGE[names](path)
    blocks.read.clear()
    after = process(indexes=indexes, checkpoint=1)
    assert after.items() == EXPECTED
    assert blocks.read != []
    if DAMAGE[names] is Path.unlink:
        again = after.write(after.freeze(2, 1))
        blocks.read.clear()
        assert process(indexes=again, checkpoint=2).items() == EXPECTED
        assert blocks.read == []


def test_states_that_are_damaged_behind_their_beginning(process: Process, blocks: StateBlocks, tmp_path: Path) -> None:
    """The files open, and the damage shows when they are read."""
    _, indexes = run(process)
    for path in (tmp_path / OPERATOR / "0-7").glob("saved-*/*.sst"):
        path.write_bytes(os.urandom(2_000) + path.read_bytes()[2_000:])
    blocks.read.clear()
    refused(lambda: process(indexes=indexes, checkpoint=1).items(), LocalFilesFailed, "A damaged file was read.")
    assert process(indexes=indexes, checkpoint=1).items() == EXPECTED
    assert blocks.read != []


def test_another_type(process: Process, blocks: StateBlocks) -> None:
    _, indexes = run(process)
    blocks.read.clear()
    after = process(float, indexes=indexes, checkpoint=1)
    assert after.items() == {key: float(state) for key, state in EXPECTED.items()}
    assert blocks.read != []
    refused(lambda: process(str, indexes=indexes, checkpoint=1).items(), ExactlyOnceError, "It was read as text.")


def test_other_parallelism(process: Process, blocks: StateBlocks, tmp_path: Path) -> None:
    subtasks, indexes = run(process)
    subtasks.backend.close()
    for parallelism in (2, 1):
        after = process(indexes=indexes, checkpoint=1, parallelism=parallelism)
        assert after.items() == EXPECTED
        shares = sorted(path.name for path in (tmp_path / OPERATOR).iterdir())
        assert shares == (["0-3", "4-7"] if parallelism == 2 else ["0-7"])
        after.backend.close()


def test_all_workers_of_another_parallelism_begin_at_once(tmp_path: Path) -> None:
    memory = Memory(1 << 20)
    for number in range(5):
        older = tmp_path / str(number) / "0-7"
        for name in range(20):
            (older / f"saved-{name}").mkdir(parents=True)

        def begin(group: int, folder: Path = older.parent) -> LocalFiles:
            wanted = Marker(
                version=VERSION, operator=OPERATOR, groups=(group,), max_parallelism=8, checkpoint=0, digest=b"",
                schema=None, files={}, counts={}, entries={}, oldest={},
            )  # fmt: skip
            return LocalFiles(folder, wanted, memory)

        with ThreadPoolExecutor(8) as pool:
            begun = list(pool.map(begin, range(8)))
        for each in begun:
            each.close()
        assert not older.exists()


def test_workers_that_have_all_key_groups(blocks: StateBlocks, tmp_path: Path) -> None:
    def worker(subtask: int, of: int, indexes: list[list[bytes]], checkpoint: int) -> Subtasks:
        backend = RocksDBBackend(tmp_path, 1 << 20, f"{subtask}-of-{of}" if of > 1 else "")
        found = indexes[subtask] if indexes else []
        return Subtasks(backend, blocks, int, checkpoint=checkpoint, indexes=found)

    indexes: list[list[bytes]] = []
    for checkpoint in (1, 2):
        workers = [worker(subtask, 2, indexes, checkpoint - 1) for subtask in range(2)]
        assert blocks.read == []
        for number, each in enumerate(workers):
            each.put(dict.fromkeys(range(200), number))
        indexes = [each.write(each.freeze(checkpoint, checkpoint - 1)) for each in workers]
        for each in workers:
            each.backend.close()
    shares = sorted(path.name for path in (tmp_path / OPERATOR).iterdir())
    assert shares == ["0-7.0-of-2", "0-7.1-of-2"]
    worker(0, 1, [], 0).backend.close()
    assert [path.name for path in (tmp_path / OPERATOR).iterdir()] == ["0-7"]


def test_what_operators_of_before_have_left(process: Process, tmp_path: Path) -> None:
    subtasks, _ = run(process)
    backend = RocksDBBackend(tmp_path, 1 << 20)
    backend.delete_others([OPERATOR])
    assert len(folders(tmp_path, "saved-")) == 1
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("of somebody else")
    (tmp_path / "mine.txt").write_text("of somebody else")
    backend.delete_others(["renamed"])
    assert (folders(tmp_path, "saved-"), len(folders(tmp_path, "work-"))) == ([], 1)
    assert subtasks.items() == EXPECTED | {key_of(5): 99, key_of(3_000): 1}
    subtasks.backend.close()
    backend.delete_others(["renamed"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt", "notes"]
    assert (tmp_path / "notes" / "mine.txt").exists()


def test_a_clean_end(process: Process, blocks: StateBlocks, tmp_path: Path) -> None:
    subtasks, indexes = run(process)
    subtasks.backend.close()
    assert (folders(tmp_path, "work-"), len(folders(tmp_path, "saved-"))) == ([], 1)
    blocks.read.clear()
    assert process(indexes=indexes, checkpoint=1).items() == EXPECTED
    assert blocks.read == []


_ANOTHER = """
import os, sys
from pathlib import Path
from exactlyonce.state.backend import CheckpointedState
from exactlyonce.state.chain import decode_index
from exactlyonce.state.rocksdb.backend import RocksDBBackend
backend = RocksDBBackend(Path(sys.argv[1]), 1 << 20)
table = CheckpointedState(operator="totals", type=int, groups=range(8), max_parallelism=8).table(backend)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_that_hangs_keeps_its_files(process: Process, tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", _ANOTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        (theirs,) = folders(tmp_path, "work-")
        process()
        assert theirs in folders(tmp_path, "work-")
    finally:
        other.kill()
        other.wait()
    process()
    assert theirs not in folders(tmp_path, "work-")


def test_an_extra_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    monkeypatch.delitem(sys.modules, "exactlyonce.state.rocksdb.memory", raising=False)
    with pytest.raises(ExactlyOnceError, match=r"pip install 'rocksdict>=0.3.29'"):
        RocksDBBackend(tmp_path, 1 << 20)
