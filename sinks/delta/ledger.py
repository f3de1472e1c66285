"""The ledger of a sink as transaction identifiers of a Delta table, which are an application's name and a number.

    exactlyonce/<pipeline>/<sink>              the incarnation that may commit
    exactlyonce/<pipeline>/<sink>/origin       the length of the checkpoint topic's id, in bytes
    exactlyonce/<pipeline>/<sink>/origin/<n>   seven of these bytes, as a number
    exactlyonce/<pipeline>/<sink>/subtasks     one more than the highest subtask
    exactlyonce/<pipeline>/<sink>/<subtask>    its checkpoint

Invariants: every commit of ours writes the first one, so any two of one sink conflict; the table keeps the newest of
each, without end, for none has a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from exactlyonce.sinks.ledger import SinkLedger

CHUNK_BYTES = 7
"""A number has 63 bits."""
VersionOf = Callable[[str], int | None]


def application(pipeline: str, sink: str) -> str:
    """The name of the first; no name of a pipeline or sink has a slash in it."""
    return f"exactlyonce/{pipeline}/{sink}"


def read(app: str, version_of: VersionOf) -> SinkLedger:
    """The ledger under the name *app*.

    >>> ledger = SinkLedger(incarnation=3, origin="a longer topic id", checkpoints={0: 7, 2: 9})
    >>> read("a", dict(changes("a", SinkLedger(), ledger)).get) == ledger
    True
    >>> dict(changes("a", ledger, SinkLedger(incarnation=3, origin=ledger.origin, checkpoints={0: 8, 2: 9})))
    {'a': 3, 'a/0': 8}
    """
    incarnation = version_of(app)
    if incarnation is None:
        return SinkLedger()
    length = version_of(f"{app}/origin") or 0
    chunks = [version_of(f"{app}/origin/{number}") or 0 for number in range(-(-length // CHUNK_BYTES))]
    origin = b"".join(chunk.to_bytes(CHUNK_BYTES, "little") for chunk in chunks)[:length].decode()
    versions = {subtask: version_of(f"{app}/{subtask}") for subtask in range(version_of(f"{app}/subtasks") or 0)}
    checkpoints = {subtask: checkpoint for subtask, checkpoint in versions.items() if checkpoint is not None}
    return SinkLedger(incarnation=incarnation, origin=origin, checkpoints=checkpoints)


def changes(app: str, before: SinkLedger, after: SinkLedger) -> Iterator[tuple[str, int]]:
    """The transactions of a commit that replaces *before* with *after*."""
    yield app, after.incarnation
    if after.origin != before.origin:
        origin = after.origin.encode()
        yield f"{app}/origin", len(origin)
        for number in range(-(-len(origin) // CHUNK_BYTES)):
            chunk = origin[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            yield f"{app}/origin/{number}", int.from_bytes(chunk, "little")
    subtasks = max(after.checkpoints, default=-1) + 1
    if subtasks > max(before.checkpoints, default=-1) + 1:
        yield f"{app}/subtasks", subtasks
    for subtask, checkpoint in after.checkpoints.items():
        if checkpoint != before.checkpoints.get(subtask):
            yield f"{app}/{subtask}", checkpoint
