"""The model against a real broker on random histories.

    EXACTLYONCE_SEEDS=1000-1999 python -m pytest tests/testing/test_random_histories.py

plays other seeds than the ones below; a failing seed is shown with the fewest steps that still fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from exactlyonce.testing import Error, Isolation, SimulatedClock
from exactlyonce.testing.broker.histories import Stage, Step, difference, play, shortest
from exactlyonce.testing.broker.model import BrokerModel
from exactlyonce.testing.broker.partition_log import PartitionLog
from exactlyonce.testing.broker.random_histories import random_history
from exactlyonce.testing.broker.transaction_coordinator import State, TransactionCoordinator, TransactionEntry

STEPS = 80
NewStage = Callable[[], Stage]


def seeds() -> range:
    """`EXACTLYONCE_SEEDS`, one number or first-last, or the usual ones."""
    first, _, last = os.environ.get("EXACTLYONCE_SEEDS", "0-29").partition("-")
    return range(int(first), int(last or first) + 1)


def differs(history: Sequence[Step], one: NewStage, other: NewStage) -> str | None:
    """How the two see *history* differently; a history without sense, as shortening makes them, is no difference."""
    try:
        return difference(history, one(), other())
    except LookupError:
        return None


@pytest.mark.exhaustive(but=[str(seed) for seed in seeds()[:2]])
@pytest.mark.parametrize("seed", seeds())
def test_the_model_answers_as_the_real_broker(seed: int, new_model_stage: NewStage, new_real_stage: NewStage) -> None:
    history = random_history(seed, STEPS)
    if difference(history, new_model_stage(), new_real_stage()) is None:
        return
    short = shortest(history, lambda shorter: differs(shorter, new_model_stage, new_real_stage) is not None)
    pytest.fail(
        f"{differs(short, new_model_stage, new_real_stage)}\n"
        f"Here, one is the model and other the real broker. To see it again:\n"
        f"    EXACTLYONCE_SEEDS={seed} python -m pytest tests/testing/test_random_histories.py",
        pytrace=False,
    )


def test_a_seed_is_a_history() -> None:
    assert random_history(7) == random_history(7)
    assert random_history(7) != random_history(8)


ANSWERS = {
    "Init": "NONE",
    "Produce": "NONE INVALID_PRODUCER_EPOCH INVALID_TXN_STATE OUT_OF_ORDER_SEQUENCE_NUMBER",
    "End": "NONE PRODUCER_FENCED INVALID_TXN_STATE INVALID_PRODUCER_ID_MAPPING",
    "Add": "NONE INVALID_PRODUCER_EPOCH",
    "Describe": "Empty Ongoing CompleteCommit CompleteAbort",
    "Read": "NONE OFFSET_OUT_OF_RANGE",
    "AddPartitions": "NONE INVALID_PARTITIONS",
    "DeleteRecords": "NONE OFFSET_OUT_OF_RANGE",
    **dict.fromkeys(("Producers", "Listed"), "shown"),
    **dict.fromkeys(("Fence", "CreateTopic", "DeleteTopic"), "NONE"),
}


def test_every_answer_is_drawn(sound: Histories) -> None:
    """The usual seeds reach every error that their steps can meet, so agreeing on them means something."""
    drawn = set()
    for history, shown in sound:
        for step, seen in zip(history, shown, strict=True):
            answer = seen[0] if isinstance(seen, tuple) else seen
            drawn.add((type(step).__name__, answer if isinstance(answer, str) else "shown"))
    assert drawn == {(step, answer) for step, answers in ANSWERS.items() for answer in answers.split()}


def _abort_of_an_idle_id_refused(self: TransactionCoordinator, *request: Any) -> Error:
    transaction = self.transactions.get(request[0])
    idle = transaction is not None and transaction.state is State.EMPTY
    return Error.INVALID_TXN_STATE if idle else _end(self, *request)


def _end_without_raising_the_epoch(self: TransactionCoordinator, *request: Any) -> Error:
    error, transaction = _end(self, *request), self.transactions.get(request[0])
    if error is Error.NONE and transaction is not None and transaction.state.value.startswith("Prepare"):
        transaction.epoch -= 1
    return error


def _init_that_leaves_it_open(self: TransactionCoordinator, name: str, timeout_ms: int, now_ms: int) -> Any:
    transaction = self.transactions.get(name)
    if transaction is not None and transaction.state is State.ONGOING:
        transaction.state = State.EMPTY
    return _initialize(self, name, timeout_ms, now_ms)


def _marker_that_takes_no_offset(self: PartitionLog, *marker: Any, **outcome: Any) -> None:
    _end_transaction(self, *marker, **outcome)
    self.end_offset -= 1


def _marker_that_keeps_sequences(self: PartitionLog, producer_id: int, epoch: int, **outcome: Any) -> None:
    before = self.producers.get(producer_id)
    _end_transaction(self, producer_id, epoch, **outcome)
    if before is not None:
        self.producers[producer_id] = before


def _reader_that_sees_aborted(self: PartitionLog, offset: int, isolation: Isolation) -> Any:
    self._aborted.clear()
    return _fetch(self, offset, isolation)


def _reader_that_does_not_wait(self: PartitionLog, offset: int, isolation: Isolation) -> Any:
    fetched = _fetch(self, offset, Isolation.READ_UNCOMMITTED)
    return fetched._replace(records=tuple(record for record in fetched.records if record.offset not in self._aborted))


def _no_verification(self: TransactionCoordinator, *question: Any) -> Error:
    return Error.NONE


def _no_memory_of_batches(self: PartitionLog, *batch: Any, **how: Any) -> Any:
    self.producers.clear()
    return _append(self, *batch, **how)


def _late_record_left_out(self: TransactionCoordinator, transaction: TransactionEntry, *rest: Any) -> None:
    transaction.partitions.clear()
    _prepare(self, transaction, *rest)


_end, _initialize = TransactionCoordinator.end, TransactionCoordinator.initialize
_prepare = TransactionCoordinator.prepare
_end_transaction, _fetch, _append = PartitionLog.end_transaction, PartitionLog.fetch, PartitionLog.append

DEFECTS = [
    (TransactionCoordinator, "end", _abort_of_an_idle_id_refused),
    (TransactionCoordinator, "end", _end_without_raising_the_epoch),
    (TransactionCoordinator, "initialize", _init_that_leaves_it_open),
    (TransactionCoordinator, "verify", _no_verification),
    (TransactionCoordinator, "prepare", _late_record_left_out),
    (PartitionLog, "end_transaction", _marker_that_takes_no_offset),
    (PartitionLog, "end_transaction", _marker_that_keeps_sequences),
    (PartitionLog, "fetch", _reader_that_sees_aborted),
    (PartitionLog, "fetch", _reader_that_does_not_wait),
    (PartitionLog, "append", _no_memory_of_batches),
]


Histories = list[tuple[Sequence[Step], list[Any]]]


@pytest.fixture(scope="module")
def sound() -> Histories:
    histories = [random_history(seed, STEPS) for seed in range(30)]
    return [(history, _seen(history)) for history in histories]


@pytest.mark.parametrize(("where", "name", "defect"), DEFECTS, ids=[each[2].__name__.strip("_") for each in DEFECTS])
def test_a_defect_of_the_model_is_found(
    where: type, name: str, defect: Callable[..., Any], sound: Histories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, defect)
    assert any(_seen(history) != seen for history, seen in sound)


def _seen(history: Sequence[Step]) -> list[Any]:
    clock = SimulatedClock()
    try:
        return play(history, Stage(BrokerModel(clock), clock.advance, ""))
    except Exception as failure:
        return [failure]
