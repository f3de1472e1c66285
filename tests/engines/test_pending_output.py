"""Open transactions count as decided where a manifest or a repair names them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from blank_manifest import blank_committable

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Committable, Finalized, Repair, Written
from exactlyonce.checkpoint.requests import ListedTransaction, TransactionState
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.pending_output import find_transactions, unfinalized_committables

NAMES = [f"eo:p:out:0:{incarnation}.0:0" for incarnation in (1, 2, 3)]


class Broker:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def describe(self, names: list[str]) -> dict[str, TransactionState]:
        return {name: TransactionState(name, "PrepareCommit", 7, self.epoch, 1, 1, (("out", 0),)) for name in names}


def committable(name: str) -> Committable:
    return blank_committable(transactional_id=name, epoch=4, checkpoint=1, written=(Written("out", 0, 0, 1),))


@pytest.mark.parametrize(
    ("epoch", "finalized", "found"),
    [(4, False, [1, 1, None]), (5, False, [1, 1, None]), (4, True, [1, 1, None]), (5, True, [None, None, None])],
)
def test_what_a_decision_names(epoch: int, finalized: bool, found: list[int | None]) -> None:
    """Every id of the checkpoint or a repair is decided until it is finalized; later it may be reused."""
    history = History("p")
    history.manifests[1] = cast(Any, SimpleNamespace(checkpoint=1, committables=[committable(NAMES[0])]))
    history.repairs[1] = {1: Repair(1, 1, 1, NAMES[0], committable(NAMES[1]))}
    if finalized:
        history.finalized[1] = Finalized(1, 1, 0, ())
    listed = [ListedTransaction(name, 7, "PrepareCommit") for name in NAMES]
    shown = find_transactions(cast(Transactions, Broker(epoch)), listed, history)
    assert [each.decided_in for each in shown] == found
    assert list(unfinalized_committables(history)) == ([] if finalized else NAMES[:2])
