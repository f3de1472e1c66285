"""The history of the decision log is a fold over its records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.records.encoding import Decision, DecisionKey, encode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Finalized, Incarnation, Manifest, Repair
from exactlyonce.pipeline.errors import Halt, InvariantViolation

Make = Callable[..., Manifest]


def mark(checkpoint: int, *names: str) -> Finalized:
    return Finalized(checkpoint, 1, 0, tuple((name, "committed") for name in names))


def incarnation(number: int) -> Incarnation:
    return Incarnation(incarnation=number, host="host", process=1, started_at_ms=0, heartbeat_ms=0)


def read(*records: Decision | tuple[str, bytes | None]) -> History:
    """The history of a log with these records; a pair is a key and whatever was written under it."""
    history = History("p")
    for record in records:
        key, value = record if isinstance(record, tuple) else (str(DecisionKey.of(record)), encode(record))
        history.read(key.encode(), value, hashlib.sha256(value).digest() if value is not None else None)
    history.finish_reading()
    return history


class TestReading:
    def test_an_empty_log(self) -> None:
        """A log without records is a pipeline that has never lived."""
        history = read()
        assert (history.latest, history.unfinalized, history.newest_incarnation) == (None, None, None)
        assert (history.incarnation_latest, history.checkpoint_latest, history.damaged) == (0, -1, {})

    def test_the_newest_manifest_is_unfinalized_until_its_mark(self, manifest: Make) -> None:
        """The newest manifest is unfinalized until its mark is there."""
        assert read(manifest(1), mark(1), manifest(2)).unfinalized == manifest(2)
        history = read(manifest(1), mark(1), manifest(2), mark(2))
        assert (history.latest, history.unfinalized) == (manifest(2), None)
        assert history.retained == [manifest(1), manifest(2)]

    def test_a_later_record_of_a_key_replaces_the_earlier(self) -> None:
        """Of one incarnation the last heartbeat counts."""
        beat = msgspec.structs.replace(incarnation(2), heartbeat_ms=99)
        history = read(incarnation(1), incarnation(2), beat)
        assert history.newest_incarnation == beat
        assert history.incarnation_latest == 2

    def test_tombstones(self, manifest: Make) -> None:
        """What is tombstoned is gone, but its number is never used again."""
        history = read(manifest(1), mark(1), ("manifest/1", None), ("finalized/1", None), ("incarnation/7", None))
        assert (history.manifests, history.finalized, history.damaged) == ({}, {}, {})
        assert (history.checkpoint_latest, history.incarnation_latest) == (1, 7)

    def test_repairs_come_in_their_order(self, manifest: Make) -> None:
        """The repairs of a checkpoint are in the order of their numbers."""
        repairs = [Repair(1, number, 1, "lost", manifest(1).committables[0]) for number in (2, 10, 1)]
        assert [each.number for each in read(manifest(1), *repairs).repairs_of(1)] == [1, 2, 10]


class TestDamage:
    def test_garbage_is_kept_by_key(self, manifest: Make) -> None:
        """A value that cannot be decoded is reported under its key, and what it replaced is not believed either."""
        history = read(manifest(1), mark(1), ("manifest/1", b"garbage"))
        assert list(history.damaged) == ["manifest/1"]
        assert history.manifests == {}

    def test_damaged_checkpoints_are_those_behind_the_newest(self, manifest: Make) -> None:
        """A checkpoint whose manifest cannot be read, or is gone, is known by its number until it is tombstoned."""
        records: tuple[Decision | tuple[str, bytes | None], ...]
        records = (mark(1), ("manifest/2", b"garbage"), mark(2), manifest(3), mark(3), ("repair/3/1", b"garbage"))
        history = read(*records, ("manifest/4", b"garbage"), ("incarnation/1", b"garbage"))
        assert history.damaged_checkpoints() == [1, 2]
        history.forget(history.keys_of(2))
        assert history.damaged_checkpoints() == [1]

    def test_a_value_without_its_digest_is_damage(self, manifest: Make) -> None:
        """A well-formed value that does not come with its SHA-256 was not written by exactlyonce."""
        history = History("p")
        history.read(b"manifest/1", encode(manifest(1)), None)
        history.read(b"manifest/2", encode(manifest(2)), hashlib.sha256(b"other").digest())
        assert set(history.damaged) == {"manifest/1", "manifest/2"}

    def test_a_value_under_another_key_is_damage(self, manifest: Make) -> None:
        """A manifest counts only under its own key."""
        history = read(("manifest/2", encode(manifest(1))))
        assert "belongs to manifest/1" in history.damaged["manifest/2"]

    def test_two_manifests_of_one_checkpoint(self, manifest: Make) -> None:
        """Two different manifests of one checkpoint are damage, also if the first was tombstoned in between."""
        other = manifest(1, parallelism=9)
        for between in ((), (("manifest/1", None),)):
            history = read(manifest(1), *between, other)
            assert "two different manifests" in history.damaged["manifest/1"]
        assert read(manifest(1), manifest(1)).damaged == {}

    def test_a_finalized_mark_without_its_manifest(self) -> None:
        """A mark whose manifest is gone is damage: both go together."""
        assert "its manifest is gone" in read(mark(4)).damaged["manifest/4"]

    def test_a_damaged_incarnation_still_counts(self) -> None:
        """The number of an unreadable incarnation is not used again."""
        history = read(incarnation(1), ("incarnation/9", b"garbage"))
        assert history.incarnation_latest == 9
        history.halt_if_damaged()

    def test_damage_of_the_newest_decision_halts(self, manifest: Make) -> None:
        """Going back behind an unreadable manifest could emit its output again: that is a halt which names it."""
        for newest in (("manifest/2", b"garbage"), mark(2)):
            with pytest.raises(Halt, match="manifest/2: "):
                read(manifest(1), mark(1), newest).halt_if_damaged()

    def test_damage_below_the_newest_decision_costs_only_an_old_checkpoint(self, manifest: Make) -> None:
        """With a readable newer manifest, an older damaged one is not needed."""
        read(("manifest/1", b"garbage"), mark(1), manifest(2), mark(2)).halt_if_damaged()

    def test_a_damaged_repair_halts_while_it_is_needed(self, manifest: Make) -> None:
        """A damaged repair hides which transaction stands in for the lost one, until the checkpoint is finalized."""
        with pytest.raises(Halt, match="repair/1/1"):
            read(manifest(1), ("repair/1/1", b"garbage")).halt_if_damaged()
        read(manifest(1), ("repair/1/1", b"garbage"), mark(1)).halt_if_damaged()

    def test_a_damaged_mark_only_repeats_the_commit(self, manifest: Make) -> None:
        """Without a readable mark the checkpoint is finished again, which is safe."""
        history = read(manifest(1), ("finalized/1", b"garbage"))
        history.halt_if_damaged()
        assert history.unfinalized == manifest(1)

    def test_records_of_others(self, manifest: Make) -> None:
        """A key that exactlyonce never writes is reported, and decides nothing."""
        history = read(manifest(1), ("hello", b"world"))
        history.read(b"\xff", b"not even text", None)
        assert list(history.damaged) == ["hello", "\\xff"]
        history.halt_if_damaged()


class TestWriting:
    def test_ids_only_grow(self, manifest: Make) -> None:
        """No second manifest of a checkpoint is written, and none of an older one, readable or not."""
        for history in (read(manifest(2), mark(2)), read(("manifest/2", None)), read(("manifest/2", b"garbage"))):
            for checkpoint in (1, 2):
                with pytest.raises(InvariantViolation, match="only grow"):
                    history.admit(manifest(checkpoint))
            history.admit(manifest(3))

    def test_one_decision_after_the_other(self, manifest: Make) -> None:
        """No manifest is written while the one before is not finalized."""
        history = read(manifest(1))
        with pytest.raises(InvariantViolation, match="must be finalized"):
            history.admit(manifest(2))
        history.admit(mark(1, *_names(manifest(1))))
        history.admit(manifest(2))

    def test_a_mark_tells_every_fate(self, manifest: Make) -> None:
        """A checkpoint is final when the fate of each committable with records is known, and only then."""
        with pytest.raises(InvariantViolation, match="is open"):
            read(manifest(1)).admit(mark(1))
        empty = msgspec.structs.replace(manifest(1).committables[0], written=())
        read(manifest(1, committables=(empty,))).admit(mark(1))

    def test_only_the_newest_is_finalized(self, manifest: Make) -> None:
        """A mark for any other than the newest, unfinalized manifest is refused."""
        history = read(manifest(1, committables=()), mark(1))
        for checkpoint in (0, 1, 2):
            with pytest.raises(InvariantViolation, match="can be finalized"):
                history.admit(mark(checkpoint))

    def test_repairs_are_written_once_and_for_the_unfinalized(self, manifest: Make) -> None:
        """A repair stands for the unfinalized checkpoint, under a number of its own."""
        repair = Repair(1, 1, 1, "lost", manifest(1).committables[0])
        history = read(manifest(1))
        history.admit(repair)
        with pytest.raises(InvariantViolation, match="written already"):
            history.admit(repair)
        with pytest.raises(InvariantViolation, match="unfinalized checkpoint"):
            read(manifest(1), mark(1)).admit(repair)

    def test_what_belongs_together_is_dropped_together(self, manifest: Make) -> None:
        """A manifest, its mark and its repairs are dropped together, and the newest never."""
        repair = Repair(1, 1, 1, "lost", manifest(1).committables[0])
        history = read(manifest(1), repair, mark(1), manifest(2))
        with pytest.raises(InvariantViolation, match="in one transaction"):
            history.forget([DecisionKey(Manifest, 1), DecisionKey(Finalized, 1)])
        with pytest.raises(InvariantViolation, match="newest checkpoint"):
            history.forget(history.keys_of(2))
        history.forget(history.keys_of(1))
        assert (history.retained, history.repairs_of(1)) == ([manifest(2)], [])

    def test_the_newest_incarnation_stays(self) -> None:
        """Older incarnations may be forgotten, the newest not: the next number comes from it."""
        history = read(incarnation(1), incarnation(2))
        history.forget([DecisionKey(Incarnation, 1)])
        with pytest.raises(InvariantViolation, match="newest incarnation"):
            history.forget([DecisionKey(Incarnation, 2)])

    def test_a_copy_is_a_trial(self, manifest: Make) -> None:
        """What is admitted to a copy changes only the copy."""
        history = read(manifest(1, committables=()))
        trial = history.copy()
        trial.admit(Repair(1, 1, 1, "lost", manifest(1).committables[0]))
        trial.admit(mark(1))
        assert (history.unfinalized, history.repairs_of(1)) == (manifest(1, committables=()), [])
        assert trial.unfinalized is None


def _names(manifest: Any) -> list[str]:
    return [each.transactional_id for each in manifest.committables]
