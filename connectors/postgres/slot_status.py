"""What a server says about a slot and its log: for the page and the metrics of a run, and for the doctor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.changes import finding_of, not_captured
from exactlyonce.connectors.postgres.change_stream import read_lsn
from exactlyonce.connectors.postgres.changes import PostgresSlot
from exactlyonce.connectors.postgres.connection import Limits, PostgresConnection
from exactlyonce.connectors.postgres.dsn import quoted
from exactlyonce.connectors.postgres.slot import (
    Cursor,
    publication_problems,
    require_kept,
    require_slot,
    server_problems,
    table_problems,
)
from exactlyonce.connectors.postgres.table_rows import found_table
from exactlyonce.connectors.source import LogRead, TableRead
from exactlyonce.connectors.splits import SourceFinding
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ConfigError, Halt, StoreError, StoreUnavailable
from exactlyonce.pipeline.sizes import shown_bytes

SOON_SHARE = 4
"""A server may soon remove log once less than a fourth of what it may keep is left."""
LONG_TRANSACTION_S = 600


class SlotLog:
    """Asks how far a reader of a slot is in the server's log. It belongs to the thread of *session*."""

    def __init__(self, session: PostgresConnection, slot: str) -> None:
        self._session, self._slot = session, slot
        self._read_ms = 0
        """All commits before it were read, by the server's clock; at first, the time of the first question."""
        self._mark = 0, 0
        """The end of the log at an earlier question, and its time: the oldest that was not reached yet."""

    def look(self, lsn: int, committed_ms: int, tables: list[TableRead]) -> LogRead:
        """The log for a reader that is at *lsn*, whose last commit was at *committed_ms*, 0 if there was none."""
        try:
            ((end_text, now_ms, status, safe, kept),) = self._session.rows(_LOG, (self._slot,))
        except (StoreError, StoreUnavailable):
            return LogRead(name=self._slot, tables=tables)
        end, (mark, mark_ms) = read_lsn(end_text), self._mark
        self._read_ms = max(self._read_ms or now_ms, committed_ms)
        if lsn >= mark:
            self._read_ms = max(self._read_ms, mark_ms)
            self._mark = end, now_ms
        if lsn >= end:
            self._read_ms = now_ms
        return LogRead(
            name=self._slot, lag_ms=max(0, now_ms - self._read_ms), lag_bytes=max(0, end - lsn), kept_bytes=kept,
            safe_bytes=safe, status=status or "", problem=_problem(self._slot, status, kept, safe), tables=tables,
        )  # fmt: skip


def _problem(slot: str, status: str | None, kept: int | None, safe: int | None) -> str:
    """The danger for a slot whose server keeps *kept* bytes, and takes *safe* more; empty: none."""
    if status is None:
        return f"there is no slot {slot} any more"
    if status == "lost":
        return f"the server has removed log that slot {slot} needs: changes are lost"
    shown = shown_bytes(kept or 0)
    if status == "unreserved" or (safe is not None and safe <= 0):
        return f"the server may remove log that slot {slot} needs: it keeps {shown}, over max_slot_wal_keep_size"
    if safe is not None and safe < (safe + (kept or 0)) / SOON_SHARE:
        left = shown_bytes(safe)
        return (
            f"the server keeps {shown} of log for slot {slot}, and removes it after {left} more: changes are lost then"
        )
    return ""


def examine(slot: PostgresSlot, positions: Sequence[SourceOffset]) -> tuple[str, list[SourceFinding]]:
    """See `SplitSource.examine`."""
    name = slot.name
    with closing(PostgresConnection(slot.dsn, Limits())) as session:
        findings = list(_findings(session, slot, positions))
        rows = session.rows(_LOG, (name,))
    _, _, status, _, kept = rows[0]
    return f"slot {name}: " + (
        "missing" if status is None else f"{shown_bytes(kept or 0)} of log kept, {status}"
    ), findings


def _findings(
    session: PostgresConnection, source: PostgresSlot, positions: Sequence[SourceOffset]
) -> Iterator[SourceFinding]:
    name, version = source.name, session.version
    ((role, replicates),) = session.rows(_ROLE)
    if not replicates:
        yield SourceFinding(f"The role {role} of dsn= may not read a slot", f"ALTER ROLE {quoted(role)} REPLICATION")
    with closing(source.finder(source.id)) as finder:
        try:
            for problem in (*server_problems(session), *publication_problems(session, source)):
                yield not_captured(source.contents, problem)
            for members in source.tables:
                id, table = next(iter(members.items()))
                there = found_table(session, table, id)
                for problem in dict.fromkeys(
                    problem for member in members.values() for problem in table_problems(session, member, there)
                ):
                    yield not_captured(table.table, problem)
                if session.rows("SELECT has_any_column_privilege($1::oid, 'SELECT')", (there.oid,)) == [(False,)]:
                    grant = table.reading_grants(role)[-1].rstrip(";")
                    yield SourceFinding(f"The role {role} of dsn= may not read {table.table}", grant)
            slot_now = require_slot(session, source, source.id, was_read=bool(positions))
            if positions:
                finder.find(positions)
                if slot_now.holder is None:  # else the slot moves, and the newest checkpoint may be another by now
                    cursor = msgspec.json.decode(positions[0].cursor, type=Cursor)
                    require_kept(slot_now, cursor, source.id)
        except (ConfigError, Halt) as error:
            yield finding_of(error)
    rows = session.rows("SELECT to_jsonb(s) FROM pg_replication_slots s WHERE s.slot_name = $1", (name,))
    if not rows:
        ((slots, slots_max),) = session.rows(_SLOTS)
        if slots >= slots_max:
            yield SourceFinding(
                f"The server has no room for slot {name}: {slots} of max_replication_slots {slots_max} are there",
                "drop one that nobody needs, or ALTER SYSTEM SET max_replication_slots = ..., and restart the server",
            )
        return
    slot: dict[str, Any] = rows[0][0]
    (settings,) = session.rows(_SETTINGS)
    keep, idle, synchronized, senders_max = settings
    ((_, _, status, safe, kept),) = session.rows(_LOG, (name,))
    if status != "lost" and (problem := _problem(name, status, kept, safe)):
        yield SourceFinding(
            problem[0].upper() + problem[1:],
            f"run the pipeline, or ALTER SYSTEM SET max_slot_wal_keep_size = ... (now {keep}) and SELECT "
            f"pg_reload_conf(): what is removed is lost",
        )
    if keep == "-1":
        yield SourceFinding(
            f"The server keeps log for slot {name} without a limit: a pipeline that stands still fills its disk",
            "watch the slot; or ALTER SYSTEM SET max_slot_wal_keep_size = '50GB', SELECT pg_reload_conf(): beyond "
            "that changes are lost, and the run halts",
            is_note=True,
        )
    if idle not in (None, "0"):
        yield SourceFinding(
            f"The server gives up a slot that nobody reads for {idle} (idle_replication_slot_timeout)",
            "let the pipeline never stand for so long, or ALTER SYSTEM SET idle_replication_slot_timeout = 0, SELECT "
            "pg_reload_conf()",
            is_note=True,
        )
    ((standbys, senders),) = session.rows(_SENDERS)
    if not slot["active"] and senders >= int(senders_max):
        yield SourceFinding(
            f"The server has no walsender free for slot {name}: {senders} of max_wal_senders {senders_max} are taken",
            "end one, or ALTER SYSTEM SET max_wal_senders = ..., and restart the server",
        )
    yield from _failover(name, slot, version, standbys, synchronized)
    for process, age_s in session.rows(_OLD_TRANSACTIONS, (LONG_TRANSACTION_S,)):
        yield SourceFinding(
            f"{process} is open for {shown_duration(age_s * 1000)}: the server keeps its log from there on, also of "
            f"what was read",
            "end it: SELECT pg_terminate_backend(its process), or ROLLBACK PREPARED",
            is_note=True,
        )


def _failover(
    name: str, slot: dict[str, Any], version: int, standbys: int, synchronized: str | None
) -> Iterator[SourceFinding]:
    """What a failover to a standby would do to the slot."""
    if not standbys:
        return
    if version < 170000:
        yield SourceFinding(
            f"A failover to a standby loses slot {name}, and the run halts: PostgreSQL {version // 10000} keeps slots "
            f"on the primary alone",
            "upgrade to 17 or newer; else, after a failover, `exactlyonce changes setup` and `exactlyonce reset`",
            is_note=True,
        )
    elif not slot.get("failover"):
        yield SourceFinding(
            f"A failover to a standby loses slot {name}, whose failover is off, and the run halts",
            f"stop the pipeline, and by psql 'dbname=... replication=database': ALTER_REPLICATION_SLOT {name} "
            f"(FAILOVER true)",
            is_note=True,
        )
    elif not synchronized:
        yield SourceFinding(
            f"After a failover a standby may lack what was read of slot {name}, and the run halts: "
            f"synchronized_standby_slots is empty",
            "ALTER SYSTEM SET synchronized_standby_slots = 'the physical slot of the standby', SELECT pg_reload_conf()",
            is_note=True,
        )


_LOG = """
SELECT pg_current_wal_flush_lsn()::text, (extract(epoch FROM clock_timestamp()) * 1000)::bigint, s.wal_status,
    s.safe_wal_size, pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint
FROM (SELECT) AS one LEFT JOIN pg_replication_slots s ON s.slot_name = $1
"""
_SETTINGS = """
SELECT current_setting('max_slot_wal_keep_size'), current_setting('idle_replication_slot_timeout', true),
    current_setting('synchronized_standby_slots', true), current_setting('max_wal_senders')
"""
"""NULL where the server's version has none."""
_SLOTS = "SELECT count(*), current_setting('max_replication_slots')::int FROM pg_replication_slots"
_ROLE = """
SELECT r.rolname::text, r.rolsuper OR r.rolreplication
    OR EXISTS (SELECT FROM pg_roles m WHERE m.rolname = 'rds_replication' AND pg_has_role(r.oid, m.oid, 'MEMBER'))
FROM pg_roles r WHERE r.rolname = current_user
"""
"""On Amazon RDS a role stands for the attribute."""
_SENDERS = """
SELECT count(*) FILTER (WHERE s.slot_type IS DISTINCT FROM 'logical'), count(*)
FROM pg_stat_replication r LEFT JOIN pg_replication_slots s ON s.active_pid = r.pid
"""
_OLD_TRANSACTIONS = """
SELECT shown, age_s FROM (
    SELECT 'A transaction of process ' || pid, extract(epoch FROM clock_timestamp() - xact_start)::bigint
    FROM pg_stat_activity WHERE backend_xid IS NOT NULL
    UNION ALL
    SELECT 'The prepared transaction ' || quote_literal(gid), extract(epoch FROM clock_timestamp() - prepared)::bigint
    FROM pg_prepared_xacts) AS open (shown, age_s)
WHERE age_s > $1 ORDER BY age_s DESC LIMIT 3
"""
