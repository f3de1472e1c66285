"""The whereabouts of workers, known while they are stuck, and no longer; and a message is sent whole, or kept."""

from __future__ import annotations

import socket
from typing import Any

from exactlyonce.engines.local.messages import (
    CheckpointFinalized,
    Connection,
    Occupied,
    Progress,
    Ready,
    ToCoordinator,
    ToWorker,
)
from exactlyonce.engines.local.whereabouts import Whereabouts


def progress(subtask: int = 0, busiest: str = "", busiest_ms: float = 0.0, busiest_share: float = 0.0) -> Progress:
    return Progress(
        subtask=subtask, records_in=0, records_out=0, skipped=0, longest_gap_ms=0.0, open_transactions=0,
        first_record_ms=0, lag=0, going_round=0, waiting=[], full=[], notes=[], busiest=busiest, busiest_ms=busiest_ms,
        busiest_share=busiest_share,
    )  # fmt: skip


def of_two() -> Whereabouts:
    found = Whereabouts()
    found.started(2, 100.0)
    return found


def test_whoever_is_not_ready_is_named_with_what_it_is_in() -> None:
    """While workers start, those that are ready are not named; one that told nothing is said to be silent."""
    found = of_two()
    found.heard(0, Occupied(0, "open() of operator 'x'", 7.0), 107.0)
    assert found.hanging(107.5) == (
        "worker 0 has been in open() of operator 'x' for 7 s; worker 1 has said nothing for 8 s and is not ready"
    )
    found.heard(1, Ready(1, "print", 5), 107.5)
    found.ready(1)
    assert found.hanging(107.5) == "worker 0 has been in open() of operator 'x' for 7 s"


def test_a_worker_that_tells_of_progress_hangs_no_more() -> None:
    """What it was in is over; a moment between two signs of life is no silence."""
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
    """After ten seconds in one place it is worth a note, and not again while the attempt lasts."""
    found = of_two()
    notes = [found.heard(0, Occupied(0, "operator 'x'", 9.0 + seconds), 109.0 + seconds) for seconds in range(4)]
    assert notes == ["", "worker 0 has been in operator 'x' for 10 s: its checkpoints wait for it", "", ""]
    assert found.heard(0, Occupied(0, "operator 'y'", 11.0), 130.0)
    found.started(2, 200.0)
    assert found.heard(0, Occupied(0, "operator 'x'", 11.0), 211.0)


def test_an_operator_is_slow_that_takes_long_and_most_of_the_time() -> None:
    """One that takes microseconds, or little of the time, is not named."""
    found = of_two()
    found.heard(0, progress(0, "enrich", 50.2, 0.98), 101.0)
    found.heard(1, progress(1, "totals", 0.002, 0.98), 101.0)
    assert found.slow() == "operator 'enrich' takes 50 ms a record (98% of the time of worker 0)"
    found.heard(0, progress(0, "enrich", 50.2, 0.1), 102.0)
    assert found.slow() == ""


def test_a_coordinator_does_not_wait_for_a_worker_that_takes_nothing() -> None:
    """What a worker does not read is kept, in order, and it gets all of it when it reads again."""
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
    """Sending to it is no error, and waits for nothing."""
    for waits in (True, False):
        ours, theirs = socket.socketpair()
        connection = Connection(ours, ToCoordinator, waits=waits)
        theirs.close()
        connection.send(CheckpointFinalized(1))
        assert connection.closed
