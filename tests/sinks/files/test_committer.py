"""Publishing and the ledger, as a leader asks for them."""

from __future__ import annotations

import hashlib
import os

import pytest

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.files.layout import decode_staged
from exactlyonce.testing.sink_contract.hooks import ORIGIN


def test_an_entry_lists_the_files_of_its_committable(target, totals) -> None:
    committer = target.led(4)
    committer.commit([target.staged(3, totals(1, 2))], 4, ORIGIN)
    (entry,) = target.entries()
    (path,) = target.published()
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert entry == {
        "pipeline": "totals", "sink": "out", "subtask": 0, "checkpoint": 3, "incarnation": 4, "rows": 2,
        "files": [{"path": path.name, "rows": 2, "size": path.stat().st_size, "sha256": sha256}],
    }  # fmt: skip


# --- what is not as it was --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("renaming")
def test_a_name_that_exists_is_not_overwritten(target, totals) -> None:
    committer = target.led()
    committable = target.staged(1, totals(1))
    (listing,) = target.root.glob("staged/*/1.files")
    path = target.folder / decode_staged(listing.read_bytes())[0].path
    path.write_text("somebody else's")
    with pytest.raises(StoreError, match=rf"{path} exists, and is not the file .* Nothing was overwritten: move it"):
        committer.commit([committable], 1, ORIGIN)
    assert (path.read_text(), target.entries()) == ("somebody else's", [])
    path.unlink()
    assert committer.commit([committable], 1, ORIGIN) is True
    assert target.cents() == [1]


def test_a_staged_file_that_is_gone_is_an_error_that_says_so(make_target, totals, stage) -> None:
    target = make_target(roll_bytes=1 << 10)
    committer = target.led()
    opened = target.open()
    for each in range(3):
        opened.writer.write(opened.encoder.encode(totals(*[each] * 60)))
    committable = stage(opened, 1, totals(7)).staged.committable
    gone = next(target.root.glob(f"staged/*{opened.writer._files.writer.token}/2.jsonl"))
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(
        StoreError, match=rf"{gone} was set aside for checkpoint 1, .* Put it back .* keep clean-up programs out"
    ):
        committer.commit([committable], 1, ORIGIN)
    assert target.published() == []
    gone.write_bytes(content)
    assert committer.commit([committable], 1, ORIGIN) is True


def test_a_staged_file_that_was_changed_is_an_error(target, totals) -> None:
    committer = target.led()
    committable = target.staged(1, totals(1, 2))
    (path,) = target.root.glob("staged/*/1.jsonl")
    os.truncate(path, 5)
    with pytest.raises(StoreError, match=rf"{path} has 5 bytes, and 5\d were written"):
        committer.commit([committable], 1, ORIGIN)
    assert target.published() == []


def test_a_list_that_is_gone_or_changed_is_an_error(target, totals) -> None:
    committer = target.led()
    committable = target.staged(1, totals(1))
    (path,) = target.root.glob("staged/*/1.files")
    path.write_bytes(b"")
    with pytest.raises(StoreError, match=rf"{path} is not what was written there"):
        committer.commit([committable], 1, ORIGIN)
    path.unlink()
    with pytest.raises(StoreError, match=rf"{path} was set aside for checkpoint 1"):
        committer.commit([committable], 1, ORIGIN)


def test_files_that_a_reader_has_moved_are_not_published_again(target, totals) -> None:
    committer = target.led()
    committable = target.staged(1, totals(1))
    committer.commit([committable], 1, ORIGIN)
    target.published()[0].unlink()
    assert committer.commit([committable], 1, ORIGIN) is False
    assert target.published() == []


def test_a_folder_that_is_gone_is_waited_for(target, totals) -> None:
    """A missing target, such as an unmounted disk, is a store that is away; it is not made anew."""
    committer = target.led()
    committable = target.staged(1, totals(1))
    away = target.folder.with_name("unmounted")
    target.folder.rename(away)
    with pytest.raises(StoreUnavailable, match=r"is not there: is its disk mounted\?"):
        committer.commit([committable], 1, ORIGIN)
    assert not target.folder.exists()
    away.rename(target.folder)
    assert committer.commit([committable], 1, ORIGIN) is True


def test_a_folder_in_the_place_of_the_one_that_was_fenced_is_not_written_to(target, totals) -> None:
    """An earlier run left it where no disk was mounted; it shows again when the disk goes away."""
    target.led(1)
    disk, below = target.folder.with_name("disk"), target.folder.with_name("below")
    target.folder.rename(below)
    committer = target.led(2)
    target.folder.rename(disk)
    below.rename(target.folder)
    committable = target.staged(1, totals(1), incarnation=2)
    with pytest.raises(StoreUnavailable, match=r"of one before: is its disk mounted\?"):
        committer.commit([committable], 2, ORIGIN)
    assert target.published() == []


def test_a_folder_of_a_partition_that_is_a_file_is_an_error(make_target, totals) -> None:
    target = make_target(partition_by=("customer",))
    committer = target.led()
    committable = target.staged(1, totals(1))
    (target.folder / "customer=ann").write_text("")
    with pytest.raises(StoreError, match=r"customer=ann cannot be made, for a file is where a folder is needed"):
        committer.commit([committable], 1, ORIGIN)


# --- cleaning ---------------------------------------------------------------------------------------------------------


def test_cleaning_keeps_what_is_of_this_attempt_and_of_newer_ones(target, totals) -> None:
    committer = target.led(3)
    for incarnation, attempt in [(1, 9), (3, 1), (3, 2), (4, 1)]:
        target.staged(1, totals(1), incarnation=incarnation, attempt=attempt)
    (target.root / "staged" / "notes").mkdir(parents=True, exist_ok=True)
    committer.clean(3, 2)
    assert [name.rpartition("-")[0] for name in target.waiting()] == ["3-2-0", "4-1-0", ""]


def test_cleaning_removes_entries_that_were_being_written(target) -> None:
    committer = target.led(3)
    for name in ("2-0-7-abc", "3-0-7-abc"):
        (target.root / "temporary" / name).touch()
    committer.clean(3, 1)
    assert os.listdir(target.root / "temporary") == ["3-0-7-abc"]


def test_a_zombie_writer_adds_to_a_folder_that_is_being_removed(target, totals, monkeypatch) -> None:
    target.led(1)
    target.staged(1, totals(1))
    (name,) = target.waiting()
    unlink = os.unlink

    def unlink_and_add(path) -> None:
        unlink(path)
        (target.root / "staged" / name / "late").touch()

    monkeypatch.setattr(os, "unlink", unlink_and_add)
    committer = target.committer()
    committer.clean(2, 1)
    assert target.waiting() == [name]
    monkeypatch.undo()
    committer.clean(2, 1)
    assert target.waiting() == []
