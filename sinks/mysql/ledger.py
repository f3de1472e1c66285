"""The ledger: one row for each subtask of a sink, and one, of subtask -1, with the incarnation that may write.

Invariants: an apply holds a shared lock on row -1 from before its first row until its end, a fence an exclusive one; so
what an older incarnation began has ended when a fence returns, and finds the newer one when it begins later. Row -1 is
locked before any other. Numbers only grow. How many rows a statement has changed is looked at only where the row is
locked and its numbers differ, for there all servers and settings count alike.
"""

from __future__ import annotations

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.mysql.session import MySQLSession, quoted
from exactlyonce.sinks.write_ahead.ledger import SinkLedger
from exactlyonce.sinks.write_ahead.store import LedgerEntry, require_writer

LEDGER = "exactlyonce_ledger"
CREATE = f"""CREATE TABLE IF NOT EXISTS {LEDGER} (
  pipeline VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  sink VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  subtask INT NOT NULL,
  checkpoint BIGINT NOT NULL,
  incarnation BIGINT NOT NULL,
  origin VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  PRIMARY KEY (pipeline, sink, subtask)
) ENGINE=InnoDB ROW_FORMAT=DYNAMIC"""
WRITER = -1
"""The subtask of the row that holds the incarnation and the origin."""
_NONE_YET = -1
"""The checkpoint of a row that no checkpoint has written."""
_ROW = "WHERE pipeline = %s AND sink = %s AND subtask = %s"
_MAKE_ROW = f"INSERT INTO {LEDGER} VALUES (%s, %s, %s, {_NONE_YET}, 0, %s) ON DUPLICATE KEY UPDATE subtask = subtask"
"""Locks the row in either case, and of two who make it at once the second waits for the first, and finds its row."""


def newest(session: MySQLSession, pipeline: str, sink: str, origin: str) -> int:
    """The newest checkpoint of any subtask of the sink, 0: none, or of another checkpoint topic than *origin*."""
    rows = session.ask(
        f"SELECT subtask, checkpoint, origin FROM {LEDGER} WHERE pipeline = %s AND sink = %s", pipeline, sink
    )
    if not any(subtask == WRITER and begun_for == origin for subtask, _, begun_for in rows):
        return 0
    return max((int(checkpoint) for subtask, checkpoint, _ in rows if subtask != WRITER), default=0)


def of_sink(session: MySQLSession, pipeline: str, sink: str) -> SinkLedger:
    """All rows of the sink, as far as they are committed; waits for nobody."""
    rows = session.ask(
        f"SELECT subtask, checkpoint, incarnation, origin FROM {LEDGER} WHERE pipeline = %s AND sink = %s",
        pipeline, sink,
    )  # fmt: skip
    found = {int(subtask): rest for subtask, *rest in rows}
    _, incarnation, origin = found.pop(WRITER, (_NONE_YET, 0, ""))
    checkpoints = {subtask: max(int(checkpoint), 0) for subtask, (checkpoint, *_) in found.items()}
    return SinkLedger(incarnation=int(incarnation), origin=origin, checkpoints=checkpoints)


def fence(session: MySQLSession, pipeline: str, sink: str, incarnation: int, origin: str) -> dict[int, int]:
    """See `Store.fence`; to be called within a transaction."""
    session.ask(_MAKE_ROW, pipeline, sink, WRITER, origin)
    ((newest, begun_for),) = session.ask(
        f"SELECT incarnation, origin FROM {LEDGER} {_ROW} FOR UPDATE", pipeline, sink, WRITER
    )
    require_writer(pipeline, sink, incarnation, origin, newest=newest, begun_for=begun_for)
    session.ask(f"UPDATE {LEDGER} SET incarnation = %s {_ROW}", incarnation, pipeline, sink, WRITER)
    rows = session.ask(
        f"SELECT subtask, checkpoint FROM {LEDGER} WHERE pipeline = %s AND sink = %s AND subtask > {WRITER}",
        pipeline,
        sink,
    )
    return {int(subtask): int(checkpoint) for subtask, checkpoint in rows}


def advance(session: MySQLSession, entry: LedgerEntry) -> bool:
    """Lock the row of the subtask and set it to *entry*; -> False, with nothing changed, where it is there already.

    To be called first in the transaction that writes the rows.
    """
    writer = session.ask(
        f"SELECT incarnation, origin FROM {LEDGER} {_ROW} LOCK IN SHARE MODE", entry.pipeline, entry.sink, WRITER
    )
    if not writer:
        raise _emptied(session, entry)
    of_subtask = (entry.pipeline, entry.sink, entry.subtask)
    look = f"SELECT checkpoint, incarnation FROM {LEDGER} {_ROW} FOR UPDATE"
    found = session.ask(look, *of_subtask)
    if not found:
        session.ask(_MAKE_ROW, *of_subtask, "")
        found = session.ask(look, *of_subtask)
    ((checkpoint, incarnation),) = found
    newest, origin = max(writer[0][0], incarnation), writer[0][1]
    if not entry.is_due(checkpoint=max(checkpoint, 0), incarnation=newest, origin=origin):
        return False
    changed = session.changed_by(
        f"UPDATE {LEDGER} SET checkpoint = %s, incarnation = %s {_ROW} AND checkpoint = %s",
        entry.checkpoint, entry.incarnation, *of_subtask, checkpoint,
    )  # fmt: skip
    if changed != 1:
        raise StoreError(
            f"The table {LEDGER} has been changed although its row was locked: it has no transactions, or a proxy "
            f"sends statements to several servers. ALTER TABLE {LEDGER} ENGINE=InnoDB, and let the dsn name the server "
            f"itself."
        )
    return True


def has(session: MySQLSession, entry: LedgerEntry) -> bool:
    """Whether the row of the subtask is at *entry*, or further, as far as is committed; waits for nobody.

    Raises what `advance` raises.
    """
    rows = session.ask(
        f"SELECT subtask, checkpoint, incarnation, origin FROM {LEDGER} "
        "WHERE pipeline = %s AND sink = %s AND subtask IN (%s, %s)",
        entry.pipeline, entry.sink, WRITER, entry.subtask,
    )  # fmt: skip
    found = {subtask: rest for subtask, *rest in rows}
    if WRITER not in found:
        raise _emptied(session, entry)
    checkpoint, incarnation, _ = found.get(entry.subtask, (_NONE_YET, 0, ""))
    _, newest, origin = found[WRITER]
    return not entry.is_due(checkpoint=max(checkpoint, 0), incarnation=max(newest, incarnation), origin=origin)


def _emptied(session: MySQLSession, entry: LedgerEntry) -> StoreError:
    return StoreError(
        f"The table {LEDGER} at {session.address.place} has lost its rows of pipeline {entry.pipeline}, "
        f"sink {entry.sink}, since this run began: was it emptied, or restored from a "
        f"backup? Run again: the start compares it."
    )


def try_rights(session: MySQLSession) -> None:
    """Raise `StoreError` with the SQL to run unless the user may read and write the ledger. Changes nothing."""
    try:
        session.ask(f"EXPLAIN UPDATE {LEDGER} SET origin = '' WHERE pipeline = '' AND sink = '' AND subtask = {WRITER}")
        session.ask(f"EXPLAIN INSERT INTO {LEDGER} VALUES ('', '', {WRITER}, {_NONE_YET}, 0, '')")
    except StoreError as error:
        address = session.address
        raise StoreError(
            f"{error} For the ledger: GRANT SELECT, INSERT, UPDATE ON {quoted(address.database)}.{LEDGER} "
            f"TO {quoted(address.user)}@'%'"
        ) from None
