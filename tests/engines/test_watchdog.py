"""A coordinator knows where its workers are stuck and what they have not written; messages are sent whole."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import pytest

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.local.messages import (
    AllWritten,
    CheckpointFinalized,
    Connection,
    Occupied,
    Progress,
    Ready,
    ToCoordinator,
    ToWorker,
    WorkerFailed,
)
from exactlyonce.engines.local.workers import LastOutput, WorkerWatchdog
from exactlyonce.pipeline.errors import ExactlyOnceError, OutputLost, RecordError
from exactlyonce.pipeline.sink import Delivery
from exactlyonce.sinks import KafkaSink


def progress(subtask: int = 0, busiest: str = "", busiest_ms: float = 0.0, busiest_share: float = 0.0) -> Progress:
    return Progress(
        subtask=subtask, records_in=0, records_out=0, skipped=0, longest_gap_ms=0.0, open_transactions=0,
        first_record_ms=0, lags={}, going_round=0, waiting=[], full=[], notes=[], busiest=busiest,
        busiest_ms=busiest_ms, busiest_share=busiest_share,
    )  # fmt: skip


def of_two() -> WorkerWatchdog:
    found = WorkerWatchdog()
    found.started(2, 100.0)
    return found


def test_whoever_is_not_ready_is_named_with_what_it_is_in() -> None:
    found = of_two()
    found.heard(0, Occupied(0, "open() of operator 'x'", 7.0), 107.0)
    assert found.hanging(107.5) == (
        "worker 0 has been in open() of operator 'x' for 7 s; worker 1 has said nothing for 8 s and is not ready"
    )
    found.heard(1, Ready(1, "print", 5), 107.5)
    found.ready(1)
    assert found.hanging(107.5) == "worker 0 has been in open() of operator 'x' for 7 s"


def test_a_worker_that_tells_of_progress_hangs_no_more() -> None:
    found = of_two()
    for subtask in (0, 1):
        found.ready(subtask)
    found.heard(0, Occupied(0, "operator 'x'", 41.0), 141.0)
    found.heard(1, progress(1), 141.0)
    assert found.hanging(141.2) == "worker 0 has been in operator 'x' for 41 s"
    found.heard(0, progress(), 141.3)
    found.heard(1, progress(1), 141.3)
    assert found.hanging(141.6) == ""
    assert "worker 1 has said nothing for 20 s" in found.hanging(161.3)


def test_a_note_comes_once_for_each_place() -> None:
    found = of_two()
    notes = [found.heard(0, Occupied(0, "operator 'x'", 9.0 + seconds), 109.0 + seconds) for seconds in range(4)]
    assert notes == ["", "worker 0 has been in operator 'x' for 10 s: its checkpoints wait for it", "", ""]
    assert found.heard(0, Occupied(0, "operator 'y'", 11.0), 130.0)
    found.started(2, 200.0)
    assert found.heard(0, Occupied(0, "operator 'x'", 11.0), 211.0)


def test_an_operator_is_slow_that_takes_long_and_most_of_the_time() -> None:
    found = of_two()
    found.heard(0, progress(0, "enrich", 50.2, 0.98), 101.0)
    found.heard(1, progress(1, "totals", 0.002, 0.98), 101.0)
    assert found.slow() == "operator 'enrich' takes 50 ms a record (98% of the time of worker 0)"
    found.heard(0, progress(0, "enrich", 50.2, 0.1), 102.0)
    assert found.slow() == ""
    found.heard(0, msgspec.structs.replace(progress(), held_up=["sink 'out' waits"]), 103.0)
    assert found.slow() == "sink 'out' waits"


def test_a_coordinator_does_not_wait_for_a_worker_that_takes_nothing() -> None:
    ours, theirs = socket.socketpair()
    coordinator, worker = Connection(ours, ToCoordinator, waits=False), Connection(theirs, ToWorker, waits=True)
    for checkpoint in range(50_000):
        coordinator.send(CheckpointFinalized(checkpoint))
    got: list[Any] = []
    while len(got) < 50_000:
        coordinator.flush()
        got += worker.receive()
    assert [each.checkpoint for each in got] == list(range(50_000))


def test_a_peer_that_is_gone_closes_the_connection() -> None:
    for waits in (True, False):
        ours, theirs = socket.socketpair()
        connection = Connection(ours, ToCoordinator, waits=waits)
        theirs.close()
        connection.send(CheckpointFinalized(1))
        assert connection.closed


def last_output(*said: object, delivery: Delivery = "at_most_once") -> ExactlyOnceError | None:
    pipeline = Pipeline("counts")
    pipeline.source("in", KafkaSource("in", value=str)).sink("out", KafkaSink("out", delivery=delivery))
    output = LastOutput(pipeline.build())
    for message in (Ready(0, "", 1), Ready(1, "", 1), *said):
        output.heard(message)
    return output.error(7, lambda text: text.replace("hidden", "***"))


def waiting(subtask: int, count: int) -> Progress:
    told = progress(subtask)
    told.unwritten = {"out": count} if count else {}
    return told


def test_who_has_written_all_ends_cleanly() -> None:
    assert last_output(waiting(0, 3), AllWritten(0), AllWritten(1)) is None
    assert last_output(AllWritten(0), AllWritten(1), WorkerFailed(1, "", "close() raised")) is None


def test_what_failed_is_counted() -> None:
    said = r"Output is lost.* last checkpoint, 7.*: 1,005 of sink 'out'\..*The reason: no room, \*\*\*"
    failed = WorkerFailed(0, "", "no room, hidden", {"out": 5})
    with pytest.raises(OutputLost, match=said):
        raise last_output(failed, waiting(1, 1000)) or AssertionError
    with pytest.raises(RecordError, match=r"Output is lost.*: 5 of sink 'out'.*too large"):
        raise last_output(AllWritten(1), WorkerFailed(0, "RecordError", "too large", {"out": 5})) or AssertionError


def test_who_says_nothing_more_is_no_clean_end() -> None:
    """A worker that was killed may not have heard that it may write."""
    with pytest.raises(OutputLost, match=r"nobody knows how many, of 'out'.*was killed, or did not end in time"):
        raise last_output(AllWritten(0)) or AssertionError


def test_where_nothing_waits_nothing_is_lost() -> None:
    """Other deliveries have written before the checkpoint: only an error that comes again matters there."""
    assert last_output(delivery="exactly_once") is None
    assert last_output(WorkerFailed(0, "", "close() raised"), delivery="at_least_once") is None
    failed = last_output(WorkerFailed(0, "RecordError", "bad"), delivery="exactly_once")
    assert (type(failed), str(failed)) == (RecordError, "bad")
