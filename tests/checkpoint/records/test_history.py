"""The history of the decision log is a fold over its records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.records.encoding import Decision, DecisionKey, encode, encode_in_parts
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Finalized, Incarnation, Manifest, Repair
from exactlyonce.pipeline.errors import Halt, InvariantViolation
from tests.checkpoint.conftest import MANIFEST

Read = Decision | tuple[str, bytes | None]
"""A record of a log, or a key and whatever was written under it."""


def manifest(checkpoint: int, **changes: Any) -> Manifest:
    return msgspec.structs.replace(MANIFEST, checkpoint=checkpoint, **changes)


def mark(checkpoint: int, *names: str) -> Finalized:
    return Finalized(checkpoint, 1, 0, tuple((name, "committed") for name in names))


def incarnation(number: int) -> Incarnation:
    return Incarnation(incarnation=number, host="host", process=1, started_at_ms=0, heartbeat_ms=0)


REPAIR = Repair(1, 1, 1, "lost", MANIFEST.committables[0])


def read(*records: Read) -> History:
    history = History("p")
    for record in records:
        key, value = record if isinstance(record, tuple) else (str(DecisionKey.of(record)), encode(record))
        history.read(key.encode(), value, hashlib.sha256(value).digest() if value is not None else None)
    history.finish_reading()
    return history


class TestReading:
    def test_the_newest_manifest_is_unfinalized_until_its_mark(self) -> None:
        assert read(manifest(1), mark(1), manifest(2)).unfinalized == manifest(2)
        history = read(manifest(1), mark(1), manifest(2), mark(2))
        assert (history.latest, history.unfinalized) == (manifest(2), None)
        assert history.retained == [manifest(1), manifest(2)]

    def test_a_later_record_of_a_key_replaces_the_earlier(self) -> None:
        beat = msgspec.structs.replace(incarnation(2), heartbeat_ms=99)
        history = read(incarnation(1), incarnation(2), beat)
        assert history.newest_incarnation == beat
        assert history.incarnation_latest == 2

    def test_tombstones(self) -> None:
        """A tombstoned manifest is gone, but its number is never used again."""
        history = read(manifest(1), mark(1), ("manifest/1", None), ("finalized/1", None), ("incarnation/7", None))
        assert (history.manifests, history.finalized, history.damaged) == ({}, {}, {})
        assert (history.checkpoint_latest, history.incarnation_latest) == (1, 7)

    def test_repairs_come_in_their_order(self) -> None:
        repairs = [Repair(1, number, 1, "lost", manifest(1).committables[0]) for number in (2, 10, 1)]
        assert [each.number for each in read(manifest(1), *repairs).repairs_of(1)] == [1, 2, 10]


OTHER = manifest(1, parallelism=9)
DAMAGED: dict[str, tuple[list[Read], str, str, bool]] = {
    "the newest manifest: going back behind it could emit its output again": (
        [manifest(1), mark(1), ("manifest/2", b"garbage")], "manifest/2", "", True),
    "the newest manifest, which is finalized": (
        [manifest(1), mark(1), ("manifest/1", b"garbage")], "manifest/1", "", True),
    "a mark whose manifest is gone": ([manifest(1), mark(1), mark(2)], "manifest/2", "its manifest is gone", True),
    "a manifest under another's key": (
        [("manifest/2", encode(manifest(1)))], "manifest/2", "belongs to manifest/1", True),
    "two manifests of one checkpoint": ([manifest(1), OTHER], "manifest/1", "two different manifests", True),
    "two, with a tombstone between": (
        [manifest(1), ("manifest/1", None), OTHER], "manifest/1", "two different manifests", True),
    "an older checkpoint": ([("manifest/1", b"garbage"), mark(1), manifest(2), mark(2)], "manifest/1", "", False),
    "a repair that may stand in for what was lost": ([manifest(1), ("repair/1/1", b"garbage")], "repair/1/1", "", True),
    "a repair that is not needed any more": (
        [manifest(1), ("repair/1/1", b"garbage"), mark(1)], "repair/1/1", "", False),
    "a mark, which repeats the commit": ([manifest(1), ("finalized/1", b"garbage")], "finalized/1", "", False),
    "an incarnation, which counts all the same": (
        [incarnation(1), ("incarnation/9", b"garbage")], "incarnation/9", "", False),
}  # fmt: skip


class TestDamage:
    @pytest.mark.parametrize("case", DAMAGED)
    def test_damage_is_kept_by_key_and_halts_where_the_newest_decision_needs_it(self, case: str) -> None:
        log, key, why, halts = DAMAGED[case]
        history = read(*log)
        assert list(history.damaged) == [key]
        assert why in history.damaged[key]
        with pytest.raises(Halt, match=f"{key}: ") if halts else nullcontext():
            history.halt_if_damaged()

    def test_what_damage_does_not_hide(self) -> None:
        assert read(manifest(1), manifest(1)).damaged == {}
        assert read(manifest(1), ("finalized/1", b"garbage")).unfinalized == manifest(1)
        assert read(incarnation(1), ("incarnation/9", b"garbage")).incarnation_latest == 9

    def test_damaged_checkpoints_are_those_behind_the_newest(self) -> None:
        """A checkpoint whose manifest cannot be read, or is gone, is known by its number until it is tombstoned."""
        garbage = [(key, b"garbage") for key in ("manifest/2", "repair/3/1", "manifest/4", "incarnation/1")]
        history = read(mark(1), garbage[0], mark(2), manifest(3), mark(3), *garbage[1:])
        assert history.damaged_checkpoints() == [1, 2]
        history.forget(history.keys_of(2))
        assert history.damaged_checkpoints() == [1]

    def test_a_value_without_its_digest_is_damage(self) -> None:
        """A well-formed value that does not come with its SHA-256 was not written by exactlyonce."""
        history = History("p")
        history.read(b"manifest/1", encode(manifest(1)), None)
        history.read(b"manifest/2", encode(manifest(2)), hashlib.sha256(b"other").digest())
        assert set(history.damaged) == {"manifest/1", "manifest/2"}

    def test_records_of_others(self) -> None:
        history = read(manifest(1), ("hello", b"world"))
        history.read(b"\xff", b"not even text", None)
        assert list(history.damaged) == ["hello", "\\xff"]
        history.halt_if_damaged()


PART_KEYS = [f"manifest/1/{number}" for number in range(1, 1 + len(encode_in_parts(MANIFEST, 100)) - 1)]


def in_parts(checkpoint: int) -> list[tuple[str, bytes | None]]:
    """The records of a manifest that is larger than a record."""
    *parts, value = encode_in_parts(manifest(checkpoint), 100)
    numbered = enumerate(parts, 1)
    return [*((f"manifest/{checkpoint}/{n}", part) for n, part in numbered), (f"manifest/{checkpoint}", value)]


class TestParts:
    def test_a_manifest_is_put_together(self) -> None:
        history = read(*in_parts(1), mark(1), *in_parts(2))
        assert history.retained == [manifest(1), manifest(2)]
        assert history.damaged == {}
        assert [str(key) for key in history.keys_of(1)] == ["manifest/1", *PART_KEYS, "finalized/1"]

    def test_a_log_is_read_on(self) -> None:
        """A follower reads tombstones of what it read before."""
        history = read(*in_parts(1), mark(1), *in_parts(2), mark(2))
        for key in history.keys_of(1):
            history.read(str(key).encode(), None, None)
        history.finish_reading()
        assert (history.retained, [*history.parts], history.damaged) == ([manifest(2)], [2], {})

    @pytest.mark.parametrize("left", [0, 1, -1], ids=["all but the first", "all but the second", "all but the last"])
    def test_a_part_that_is_gone(self, left: int) -> None:
        """It is damage of its manifest, of the newest a halt; until the manifest's own tombstone comes."""
        log = in_parts(1)
        gone = log[left] if left >= 0 else log[-2]
        log.remove(gone)
        history = read(*log, mark(1))
        assert [*history.damaged] == ["manifest/1"]
        assert "is missing" in history.damaged["manifest/1"]
        with pytest.raises(Halt, match=r"Part . of . is missing"):
            history.halt_if_damaged()
        history = read(*log, mark(1), manifest(2), mark(2))
        history.halt_if_damaged()
        assert history.damaged_checkpoints() == [1]
        tombstones: list[Read] = [(str(key), None) for key in history.keys_of(1)]
        after = read(*log, mark(1), manifest(2), mark(2), (str(gone[0]), None), *tombstones)
        assert (after.damaged, after.parts, after.retained) == ({}, {}, [manifest(2)])

    def test_parts_without_their_manifest(self) -> None:
        """Compaction may remove it first; its number counts, and the tombstones of the parts come later."""
        history = read(*in_parts(3)[:-1])
        assert (history.manifests, history.damaged, history.checkpoint_latest) == ({}, {}, 3)
        history = read(*in_parts(3)[:-1], ("manifest/3", None), *((key, None) for key, _ in in_parts(3)[:-1]))
        assert (history.manifests, history.damaged, history.parts) == ({}, {}, {})

    def test_a_damaged_part(self) -> None:
        """It is known by its key, and goes with its manifest."""
        log = in_parts(1)
        log[1] = (log[1][0], b"garbage")
        history = read(*log, mark(1), manifest(2), mark(2))
        assert [*history.damaged] == ["manifest/1/2", "manifest/1"]
        assert [str(key) for key in history.keys_of(1)] == ["manifest/1", *PART_KEYS, "finalized/1"]
        history.forget(history.keys_of(1))
        assert (history.damaged, history.parts) == ({}, {})

    def test_what_is_written_is_known_without_being_read(self) -> None:
        history = read(manifest(1), mark(1))
        keys = [DecisionKey.parse(key) for key, _ in in_parts(2)[:-1]]
        trial = history.copy()
        trial.admit(manifest(2), [key for key in keys if key])
        assert [key for key in trial.keys_of(2) if key in keys] == keys
        assert history.parts == {}


class TestWriting:
    @pytest.mark.parametrize(
        ("log", "record", "why"),
        [
            ([manifest(2), mark(2)], manifest(2), "only grow"),
            ([manifest(2), mark(2)], manifest(1), "only grow"),
            ([("manifest/2", None)], manifest(2), "only grow"),
            ([("manifest/2", b"garbage")], manifest(2), "only grow"),
            ([manifest(1)], manifest(2), "must be finalized"),
            ([manifest(1)], mark(1), "is open"),
            ([manifest(1), mark(1)], mark(0), "can be finalized"),
            ([manifest(1), mark(1)], mark(1), "can be finalized"),
            ([manifest(1), mark(1)], mark(2), "can be finalized"),
            ([manifest(1), REPAIR], REPAIR, "written already"),
            ([manifest(1), mark(1)], REPAIR, "unfinalized checkpoint"),
        ],
    )
    def test_what_breaks_a_rule_is_not_written(self, log: Sequence[Read], record: Decision, why: str) -> None:
        with pytest.raises(InvariantViolation, match=why):
            read(*log).admit(record)

    def test_what_belongs_together_is_dropped_together(self) -> None:
        history = read(manifest(1), REPAIR, mark(1), manifest(2))
        with pytest.raises(InvariantViolation, match="in one transaction"):
            history.forget([DecisionKey(Manifest, 1), DecisionKey(Finalized, 1)])
        with pytest.raises(InvariantViolation, match="newest checkpoint"):
            history.forget(history.keys_of(2))
        history.forget(history.keys_of(1))
        assert (history.retained, history.repairs_of(1)) == ([manifest(2)], [])

    def test_the_newest_incarnation_stays(self) -> None:
        """Older ones may be forgotten, the newest not: the next number comes from it."""
        history = read(incarnation(1), incarnation(2))
        history.forget([DecisionKey(Incarnation, 1)])
        with pytest.raises(InvariantViolation, match="newest incarnation"):
            history.forget([DecisionKey(Incarnation, 2)])

    def test_a_copy_is_a_trial(self) -> None:
        history = read(manifest(1, committables=()))
        trial = history.copy()
        trial.admit(REPAIR)
        trial.admit(mark(1))
        assert (history.unfinalized, history.repairs_of(1)) == (manifest(1, committables=()), [])
        assert trial.unfinalized is None
