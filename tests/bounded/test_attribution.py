"""The transactions that a checkpoint claims records of, by the decision log alone."""

from __future__ import annotations

from manifests import committable, manifest

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Finalized, Repair
from exactlyonce.engines.bounded.audit.attribution import claims_of, known_writers


def history(
    *committables: Committable, repairs: tuple[Repair, ...] = (), fates: dict[str, str] | None = None
) -> History:
    """Checkpoint 7, finalized."""
    made = History("p")
    made.manifests[7] = manifest(committables=committables)
    made.finalized[7] = Finalized(7, 3, 0, tuple((fates or {}).items()))
    made.repairs[7] = {repair.number: repair for repair in repairs}
    return made


def test_transactions_claim_what_they_wrote_in_the_order_of_their_checkpoints() -> None:
    """Those that are carried from aborted checkpoints come first."""
    made = history(committable("b", 2, 7, p0=(10, 4)), committable("a", 1, 6, p0=(2, 3), p1=(0, 1)))
    claims = list(claims_of(made, made.manifests[7]))
    assert [(c.place, c.writer, c.first_offset, c.records) for c in claims] == [
        (("t", 0), (1, 5), 2, 3), (("t", 1), (1, 5), 0, 1), (("t", 0), (2, 5), 10, 4)
    ]  # fmt: skip
    assert {claim.checkpoint for claim in claims} == {7}


def test_a_repair_claims_where_it_stands_in_and_the_newest_of_them_counts() -> None:
    """Repaired in both partitions, then once more in one: each claims where it is the newest; all are known."""
    lost = committable("a", 1, p0=(2, 3), p1=(0, 1), p2=(0, 9))
    first = Repair(7, 1, 3, "a", committable("r1", 8, p0=(20, 3), p1=(30, 1)))
    second = Repair(7, 2, 3, "a", committable("r2", 9, p1=(50, 1)))
    made = history(lost, repairs=(first, second))
    claims = {claim.place[1]: claim for claim in claims_of(made, made.manifests[7])}
    assert {p: (claim.producer_id, claim.first_offset) for p, claim in claims.items()} == {
        0: (8, 20), 1: (9, 50), 2: (1, 0)
    }  # fmt: skip
    assert known_writers([made]) == {(1, 5), (8, 5), (9, 5)}


def test_an_accepted_loss_is_known() -> None:
    """What the user gave up is claimed all the same, and marked."""
    made = history(committable("a", 1, p0=(2, 3)), fates={"a": "loss accepted"})
    assert [claim.given_up for claim in claims_of(made, made.manifests[7])] == [True]
