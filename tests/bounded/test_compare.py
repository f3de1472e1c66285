"""An audit without a broker: the records that a checkpoint claims, and expected against visible ones."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from manifests import committable, manifest

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Committable, Finalized, Repair
from exactlyonce.engines.bounded.audit import claims_of, known_writers
from exactlyonce.engines.bounded.unit.lane_audit import (
    CHANGED,
    DOUBLED,
    FOREIGN,
    MISSING,
    REORDERED,
    Expected,
    Finding,
    PlainRecord,
    Seen,
    compare,
    compare_at_random,
)

PARTITION = 3


def record(word: str) -> PlainRecord:
    """`k:v` is a record with key k and value v."""
    key, _, value = word.rpartition(":")
    return PlainRecord(key.encode() or None, value.encode())


def expected(text: str) -> list[Expected]:
    """Words in order; the origin's offset is the place."""
    return [Expected(record(word), ("in", 0, place)) for place, word in enumerate(text.split())]


def seen(text: str) -> list[Seen]:
    return [Seen(record(word), 100 + place) for place, word in enumerate(text.split())]


def short(findings: list[Finding]) -> list[tuple[str, int | None, int | None]]:
    """(kind, offset in the output, offset in the input)."""
    return [(each.kind, each.offset, each.origin[2] if each.origin else None) for each in findings]


@pytest.mark.parametrize(
    ("wanted", "visible", "found"),
    [
        ("", "", []),
        ("a:1 b:2 a:3", "a:1 b:2 a:3", []),
        ("a:1 b:2 a:3", "a:1 a:3", [(MISSING, 100, 1)]),
        ("a:1 b:2 a:3", "b:2 a:3", [(MISSING, None, 0)]),
        ("a:1 b:2 a:3", "a:1 b:2", [(MISSING, 101, 2)]),
        ("a:1 b:2", "", [(MISSING, None, 0), (MISSING, None, 1)]),
        ("a:1 b:2 a:3", "a:1 b:2 b:2 a:3", [(DOUBLED, 102, 1)]),
        ("a:1 b:2 a:3", "a:1 b:2 a:3 a:1", [(DOUBLED, 103, 0)]),
        ("a:1 b:2 a:3", "a:1 b:9 a:3", [(CHANGED, 101, 1)]),
        ("a:1 b:2 a:3", "a:1 c:2 a:3", [(CHANGED, 101, 1)]),
        ("a:1 b:2 a:3 c:4", "a:1 c:9 b:9 a:3 c:4", [(FOREIGN, 101, None), (CHANGED, 102, 1)]),
        ("a:1 b:2 a:3 c:4", "a:1 a:3 b:2 c:4", [(REORDERED, 102, 1)]),
        ("a:1 b:2 c:3 d:4 e:5", "e:5 a:1 b:2 c:3 d:4", [(REORDERED, 100, 4)]),
        ("a:1 b:2", "a:1 x:7 b:2", [(FOREIGN, 101, None)]),
        ("", "x:7", [(FOREIGN, 100, None)]),
        ("x:1 x:1 x:1 y:2", "x:1 x:1 y:2", [(MISSING, 101, 2)]),
        ("x:1 y:2 x:1 y:2", "x:1 y:2 x:1 y:2 y:2", [(DOUBLED, 104, 3)]),
        (
            "a:1 b:2 a:3 b:4 c:5 d:6 e:7",
            "a:1 a:3 a:3 b:9 c:5 e:7 d:6",
            [(MISSING, 100, 1), (DOUBLED, 102, 2), (CHANGED, 103, 3), (REORDERED, 106, 5)],
        ),
    ],
)
def test_each_defect_is_named_by_its_kind_and_place(
    wanted: str, visible: str, found: list[tuple[str, int | None, int | None]]
) -> None:
    findings = compare(expected(wanted), seen(visible), PARTITION)
    assert short(findings) == found
    assert {each.partition for each in findings} <= {PARTITION}


def test_a_change_shows_both_records() -> None:
    wanted = PlainRecord(b"k", b"v", (("h", b"1"),))
    shown = PlainRecord(b"k", b"v", (("h", b"2"),))
    (finding,) = compare([Expected(wanted, None)], [Seen(shown, 7)], PARTITION)
    assert finding == Finding(CHANGED, PARTITION, 7, None, wanted, shown)


def test_records_without_a_key_may_be_in_any_partition() -> None:
    lanes = {0: seen(":1 :4 :4"), 1: seen(":2 :3 :4"), 2: []}
    assert compare_at_random(expected(":1 :2 :3 :4 :4 :4"), lanes) == []


@pytest.mark.parametrize(
    ("lanes", "found"),
    [
        ({0: ":1 :3", 1: ":2"}, [(MISSING, None, 3)]),
        ({0: ":1 :3", 1: ":2 :4 :4"}, [(DOUBLED, 102, 3)]),
        ({0: ":1 :3", 1: ":4 :2"}, [(REORDERED, 101, 1)]),
        ({0: ":1 :3", 1: ":2 :9"}, [(CHANGED, 101, 3)]),
        ({0: ":1 :3 :4", 1: ":2 :9"}, [(FOREIGN, 101, None)]),
    ],
)
def test_defects_are_found_among_records_without_a_key(
    lanes: dict[int, str], found: list[tuple[str, int | None, int | None]]
) -> None:
    visible = {partition: seen(text) for partition, text in lanes.items()}
    assert short(compare_at_random(expected(":1 :2 :3 :4"), visible)) == found


@pytest.mark.parametrize("seed", range(20))
def test_planted_defects_account_for_every_difference(seed: int) -> None:
    """An expected record is matched, changed or missing; what is seen is matched, changed, doubled or foreign."""
    rng = random.Random(seed)
    wanted = [f"k{rng.randint(0, 5)}:{place if rng.random() < 0.9 else 'same'}" for place in range(rng.randint(1, 300))]
    shown = list(wanted)
    for number in range(rng.randint(0, 4)):
        place = rng.randrange(len(shown)) if shown else 0
        match rng.choice(("drop", "double", "change", "swap")):
            case "drop":
                del shown[place : place + 1]
            case "double":
                shown[place:place] = shown[place : place + 1]
            case "change":
                shown[place : place + 1] = [f"k1:changed{number}"]
            case "swap":
                shown[place : place + 2] = reversed(shown[place : place + 2])
    findings = compare(expected(" ".join(wanted)), seen(" ".join(shown)), PARTITION)
    kinds = Counter(each.kind for each in findings)
    assert len(shown) - len(wanted) == kinds[DOUBLED] + kinds[FOREIGN] - kinds[MISSING]
    assert (findings == []) == (shown == wanted)
    assert len(findings) <= 10
    offsets = [each.offset for each in findings if each.seen is not None]
    assert len(offsets) == len(set(offsets))


def history(
    *committables: Committable, repairs: tuple[Repair, ...] = (), fates: dict[str, str] | None = None
) -> History:
    """Checkpoint 7, finalized."""
    history = History("p")
    history.manifests[7] = manifest(committables=committables)
    history.finalized[7] = Finalized(7, 3, 0, tuple((fates or {}).items()))
    history.repairs[7] = {repair.number: repair for repair in repairs}
    return history


def test_transactions_claim_what_they_wrote_in_the_order_of_their_checkpoints() -> None:
    """Those that are carried from aborted checkpoints come first."""
    checkpoints = history(committable("b", 2, 7, p0=(10, 4)), committable("a", 1, 6, p0=(2, 3), p1=(0, 1)))
    claims = list(claims_of(checkpoints, checkpoints.manifests[7]))
    assert [(c.place, c.writer, c.first_offset, c.records) for c in claims] == [
        (("t", 0), (1, 5), 2, 3), (("t", 1), (1, 5), 0, 1), (("t", 0), (2, 5), 10, 4)
    ]  # fmt: skip
    assert {claim.checkpoint for claim in claims} == {7}


def test_a_repair_claims_where_it_stands_in_and_the_newest_of_them_counts() -> None:
    lost = committable("a", 1, p0=(2, 3), p1=(0, 1), p2=(0, 9))
    first = Repair(7, 1, 3, "a", committable("r1", 8, p0=(20, 3), p1=(30, 1)))
    second = Repair(7, 2, 3, "a", committable("r2", 9, p1=(50, 1)))
    checkpoints = history(lost, repairs=(first, second))
    claims = {claim.place[1]: claim for claim in claims_of(checkpoints, checkpoints.manifests[7])}
    assert {p: (claim.producer_id, claim.first_offset) for p, claim in claims.items()} == {
        0: (8, 20), 1: (9, 50), 2: (1, 0)
    }  # fmt: skip
    assert known_writers([checkpoints]) == {(1, 5), (8, 5), (9, 5)}


def test_an_accepted_loss_is_known() -> None:
    checkpoints = history(committable("a", 1, p0=(2, 3)), fates={"a": "loss accepted"})
    assert [claim.given_up for claim in claims_of(checkpoints, checkpoints.manifests[7])] == [True]
