"""Two servers of PostgreSQL, a primary and its standby, and a failover that takes a slot along, as Patroni does."""

from __future__ import annotations

import re
import shutil
import subprocess
from glob import glob
from pathlib import Path
from typing import Any

import psycopg
from waiting import succeeds, until

from exactlyonce.connectors.postgres.dsn import quoted
from exactlyonce.testing.servers.postgres import INSTALLED, OWNER, PASSWORD, PostgresServer
from exactlyonce.testing.servers.programs import programs

SETTINGS: dict[str, str | int] = {
    "hot_standby_feedback": "on",
    "wal_keep_size": "1GB",
    "wal_receiver_status_interval": 1,
    "wal_retrieve_retry_interval": "100ms",
    "max_connections": 60,
}


class Member(PostgresServer):
    """A primary, or a standby of *primary*."""

    def __init__(self, primary: Member | None = None) -> None:
        self._primary = primary
        super().__init__()
        self.settings = {**SETTINGS}

    def _initialize(self) -> None:
        if self._primary is None:
            super()._initialize()
        else:
            if self._user:
                shutil.chown(self.folder, **self._user)
            self.copy(self._primary)

    def copy(self, primary: Member) -> None:
        """Have the data of *primary*, as its standby."""
        (program,) = programs("pg_basebackup", package="postgresql", places=_places()).values()
        shutil.rmtree(self.data, ignore_errors=True)
        subprocess.run(
            [program, "-D", str(self.data), "-R", "-X", "stream", "-c", "fast", "--no-sync", "-d", primary.dsn()],
            **self._user, check=True, cwd=self.folder, capture_output=True,
        )  # fmt: skip

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def stop(self, mode: str) -> None:
        """`pg_ctl stop` in *mode*."""
        (program,) = programs("pg_ctl", package="postgresql", places=_places()).values()
        subprocess.run(
            [program, "stop", "-D", str(self.data), "-m", mode, "-t", "60"],
            **self._user, check=True, cwd=self.folder, capture_output=True,
        )  # fmt: skip
        self.kill()

    def copy_slot(self, slot: str, other: Member, *, with_snapshots: bool = True) -> None:
        """Have the slot of *other* in this server, which does not run, and what tells which transactions were open."""
        folders = [Path("pg_replslot", slot), *([Path("pg_logical", "snapshots")] if with_snapshots else [])]
        for folder in (self.data / path for path in folders):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(other.data / folder.relative_to(self.data), folder)
            if self._user:
                for path in (folder, *folder.iterdir()):
                    shutil.chown(path, **self._user)

    @property
    def segments(self) -> set[str]:
        """The files of its log."""
        return {path.name for path in (self.data / "pg_wal").iterdir() if _SEGMENT.fullmatch(path.name)}

    def left_at(self, timeline: str) -> str:
        """The position at which this server has left *timeline*, as its history file says."""
        newest = max((self.data / "pg_wal").glob("*.history"))
        fields = [line.split() for line in newest.read_text().splitlines()]
        return next(words[1] for words in fields if words and words[0] == timeline)


def _places() -> list[str]:

    return sorted(glob(INSTALLED), reverse=True)


class Bank:
    """Both servers; which of them is the primary changes."""

    def __init__(self) -> None:
        self.primary = Member()
        self.primary.start()
        self.standby = Member(self.primary)
        self.standby.start()

    @property
    def dsn(self) -> str:
        """The connection string of the primary, whichever it is."""
        ports = sorted((self.primary.port, self.standby.port))
        hosts = ",".join(["127.0.0.1"] * len(ports))
        return psycopg.conninfo.make_conninfo(
            "", host=hosts, port=",".join(map(str, ports)), dbname="postgres", user=OWNER, password=PASSWORD,
            target_session_attrs="read-write", connect_timeout=10,
        )  # fmt: skip

    def holder(self, slot: str) -> int | None:
        """The process that reads the slot."""
        rows = self.ask("SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", slot)
        return rows[0][0] if rows else None

    def ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Have the primary run *statement*, again if it starts itself anew meanwhile."""
        answers: list[list[tuple[Any, ...]]] = []
        until(
            lambda: succeeds(lambda: answers.append(self.primary.execute(statement, *values)), psycopg.OperationalError)
        )
        return answers[0]

    def await_standby(self) -> None:
        """Returns once the standby has all that the primary has now."""
        ((end,),) = self.ask("SELECT pg_current_wal_flush_lsn()::text")
        query = "SELECT coalesce(pg_last_wal_replay_lsn() >= %s::pg_lsn, false)"
        until(lambda: self.standby.execute(query, end) == [(True,)])

    def has_log(self, slot: str) -> bool:
        """Whether the standby, which may have been copied lately, has the log that the slot needs."""
        query = "SELECT pg_walfile_name(restart_lsn) FROM pg_replication_slots WHERE slot_name = %s"
        ((segment,),) = self.ask(query, slot)
        return min(name[8:] for name in self.standby.segments) <= str(segment)[8:]  # what is before it is the timeline

    def fail_over(self, slot: str | None, how: str, *, with_snapshots: bool = True) -> None:
        """The standby becomes the primary, with the slot, if it is given. *how*: "kill", or a mode of `pg_ctl stop`,
        of the primary. Then only one of both runs."""
        if how == "kill":
            self.primary.kill()
        else:
            self.primary.stop(how)
        self.standby.stop("fast")
        if slot is not None:
            self.standby.copy_slot(slot, self.primary, with_snapshots=with_snapshots)
        self.promote()

    def promote(self) -> None:
        """Start the standby, which does not run, as the primary; the other does not run either."""
        self.primary, self.standby = self.standby, self.primary
        self.primary.start()
        self.primary.execute("SELECT pg_promote(true, 60)")

    def add_standby(self) -> None:
        """The server that was the primary is a standby of the other."""
        self.standby.kill()
        self.standby.copy(self.primary)
        self.standby.start()

    def evidence(self) -> dict[str, Any]:
        """What the primary says of its slots and its readers."""
        queries = ("SELECT * FROM pg_replication_slots", "SELECT * FROM pg_stat_replication",
                   "SELECT pid, state, wait_event, backend_type, left(query, 200) FROM pg_stat_activity")  # fmt: skip
        try:
            return {query: [list(map(str, row)) for row in self.primary.execute(query)] for query in queries}
        except psycopg.Error as error:
            return {"no answer": repr(error)}

    def drop_slot(self, slot: str) -> None:
        """Remove the slot, whoever reads it, and its publication."""
        self.ask(
            "SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE slot_name = %s"
            " AND active_pid IS NOT NULL",
            slot,
        )
        self.ask("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", slot)
        self.ask(f"DROP PUBLICATION IF EXISTS {quoted(slot)}")

    def remove(self) -> None:
        self.primary.remove()
        self.standby.remove()


def is_removed(text: str, server: Member) -> bool:
    """Whether the halt that *text* tells is right: *server* does not have the log that it says is not there."""
    found = _REMOVED.search(text)
    return found is not None and found[1] not in server.segments


def is_left_out(text: str, server: Member) -> bool:
    """Whether the halt that *text* tells is right: *server* has logged that it decodes from a later position on."""
    found = _LEFT_OUT.search(text)
    if found is None or _number(found[2]) <= _number(found[1]):
        return False
    return f"point at {found[2]}" in (server.folder / "log").read_text()


_LEFT_OUT = re.compile("leaves out what was committed from ([0-9A-F]+/[0-9A-F]+) to ([0-9A-F]+/[0-9A-F]+)")
_SEGMENT = re.compile("[0-9A-F]{24}")
_REMOVED = re.compile(r"not have the log that this slot needs.*?([0-9A-F]{24})", re.DOTALL)
_LACKS = re.compile(r"goes on at ([0-9A-F]+/[0-9A-F]+) of timeline (\d+).*lacks changes that were read", re.DOTALL)


def is_behind(text: str, server: Member) -> bool:
    """Whether the halt that *text* tells is right: *server* has left its timeline before what was read."""
    found = _LACKS.search(text)
    return found is not None and _number(found[1]) > _number(server.left_at(found[2]))


def _number(lsn: str) -> int:
    high, low = lsn.split("/")
    return int(high, 16) << 32 | int(low, 16)
