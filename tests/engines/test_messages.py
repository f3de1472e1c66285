"""The control channel between coordinator and workers."""

from __future__ import annotations

import socket

from exactlyonce.engines.local.messages import CheckpointFinalized, Connection, ToCoordinator, ToWorker


def test_a_reader_that_takes_one_message_leaves_the_others_for_the_next() -> None:
    """A worker takes `Load` alone. `Start`, which may have come with it, wakes nobody again."""
    ours, theirs = socket.socketpair()
    coordinator = Connection(ours, ToCoordinator, waits=False)
    worker = Connection(theirs, ToWorker, waits=True)
    sent = [CheckpointFinalized(checkpoint) for checkpoint in range(3)]
    for message in sent:
        coordinator.send(message)
    assert next(worker.receive(None)) == sent[0]
    assert [*worker.receive(None)] == sent[1:]
    ours.close()
    assert [*worker.receive(None)] == []
    assert worker.closed
    theirs.close()
