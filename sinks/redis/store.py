"""The Redis store: committables applied in parts, each with its ledger entry in one step.

Invariant: a part is applied behind exactly the rows that the ledger names, and the ledger names them from the same step
on. So a part that lands late, a second time, or on a server that went back, changes nothing. An answer is given when
the server has it on its disk, where it can tell (WAITAOF).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from exactlyonce.pipeline.errors import Fenced, StoreError, StoreUnavailable
from exactlyonce.sinks.redis.connection import RedisConnection
from exactlyonce.sinks.redis.encoding import RedisEncoder
from exactlyonce.sinks.redis.rows import Part, Parts, argument
from exactlyonce.sinks.redis.scripts import APPLY, FENCE, RIGHTS, WRITE, ledger_key, ledger_prefix
from exactlyonce.sinks.write_ahead.store import ForeignLedger, LedgerBehind, LedgerEntry, SinkLedger

TIMEOUT_S = 30.0
"""Without an answer; a server that is busy with a part answers much sooner."""
DURABLE_RIGHTS = ("WAITAOF 1 0 0",)


class RedisStore:
    """The store of one sink; see `Store`. *encoder* encodes its rows; *part_rows* become visible at one moment."""

    def __init__(
        self,
        url: str,
        *,
        kind: str,
        encoder: RedisEncoder,
        hash_tag: str | None = None,
        maxlen: int | None = None,
        durable: bool = True,
        part_rows: int = 10_000,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._server = RedisConnection(url, timeout_s)
        self._timeout_s = timeout_s
        self._encoder = encoder
        self._kind = kind
        self._tag = hash_tag
        self._prefix = ledger_prefix(hash_tag)
        self._before_rows = [argument(b"%d" % maxlen if maxlen else b"")] if kind == "stream" else []
        self._durable = durable
        self._can_wait = durable
        self._part_rows = part_rows

    def check(self) -> None:
        """Raise `StoreError` unless the server keeps what it is given, and the user may write it."""
        about = _parsed(self._server.command("INFO"))
        if about.get("loading") == "1":  # INFO answers all the same, and says of the log of writes that it is off
            raise self._server.away("LOADING")
        if about.get("role") in ("slave", "replica"):
            self._refuse("is a replica, which takes no writes. Give the address of the primary")
        if about.get("cluster_enabled") == "1" and self._tag is None:
            self._refuse(
                "is part of a cluster, where a script may write only what lies on one server. Give the sink a "
                'hash_tag="totals", and let key= begin every key with {totals}'
            )
        policy = about.get("maxmemory_policy", "")
        if policy.startswith("allkeys"):
            self._refuse(
                f"may evict any key (maxmemory-policy {policy}), the ledger too: rows would be lost or doubled. "
                "Set maxmemory-policy to noeviction, or to one of volatile-*: the sink's keys do not expire"
            )
        if self._durable:
            self._check_durable(about)
        self._check_rights()

    def inspect(self) -> None:
        """As in `InspectableStore`: `check` makes nothing."""
        self.check()

    def ledger_of(self, pipeline: str, sink: str) -> SinkLedger:
        """As in `InspectableStore`."""
        found = self._server.command("HGETALL", self._ledger(pipeline, sink))
        held = dict(zip(found[::2], found[1::2], strict=True))
        return SinkLedger(
            incarnation=int(held.get(b"incarnation", 0)),
            origin=held.get(b"origin", b"").decode(),
            checkpoints=_checkpoints(held),
        )

    def encoder(self) -> RedisEncoder:
        """It needs nothing of the server."""
        return self._encoder

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """As in `Store`. A script runs alone: none of an older incarnation is under way when this has run."""
        answer, found = self._server.run(FENCE, [self._ledger(pipeline, sink)], [incarnation, origin])
        if answer == b"foreign":
            raise ForeignLedger(found.decode())
        if answer == b"fenced":
            self._fenced(found, incarnation)
        self._wait_for_disk()
        return _checkpoints(dict(zip(found[::2], found[1::2], strict=True)))

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        """As in `Store`; of more than *part_rows* rows each part is one step, and a retry goes on behind the last."""
        ledger = self._ledger(entry.pipeline, entry.sink)
        parts = Parts(chunks, self._kind, self._part_rows)
        while True:
            part = parts.current()
            numbers = [entry.subtask, entry.checkpoint, entry.incarnation, entry.previous]
            numbers += [part.first, part.after, int(part.is_last)]
            head = [*(b"%d" % each for each in numbers), entry.origin.encode()]
            answer, found = self._run(APPLY[self._kind], part, head, [ledger])[:2]
            if answer == b"foreign":
                raise ForeignLedger(found.decode())
            if answer == b"fenced":
                self._fenced(found, entry.incarnation)
            if answer == b"behind":
                raise LedgerBehind(int(found))
            if answer == b"already" or (answer == b"applied" and part.is_last):
                self._wait_for_disk()
                return bool(answer == b"applied")
            if int(found) < part.first:
                raise StoreUnavailable(
                    f"{self._server.where} has lost rows of checkpoint {entry.checkpoint} that it had answered for: it "
                    f"was started again, or another has taken its place. They are applied again."
                )
            parts.advance(int(found))

    def write(self, chunks: Iterable[bytes]) -> None:
        """As in `Store`; of more than *part_rows* rows each part is one step."""
        parts = Parts(chunks, self._kind, self._part_rows)
        while True:
            part = parts.current()
            if part.rows:
                self._run(WRITE[self._kind], part, [], [])
            if part.is_last:
                break
            parts.advance(part.after)
        self._wait_for_disk()

    def close(self) -> None:
        """Let go of the connection."""
        self._server.close()

    def _ledger(self, pipeline: str, sink: str) -> bytes:
        return ledger_key(pipeline, sink, self._tag).encode()

    def _run(self, script: Any, part: Part, head: list[bytes], ledger: list[bytes]) -> list[Any]:
        """The answer of a script that writes *part*; raises where a key cannot take it."""
        sent = [*map(argument, head), *self._before_rows, *part.arguments]
        count = len(head) + len(self._before_rows) + part.argument_count
        answer: list[Any] = self._server.run_with(script, [*ledger, *part.keys], sent, count)
        if answer[0] == b"type":
            _, key, found = answer
            self._refuse(
                f"holds a {found.decode()} under the key {key.decode(errors='replace')!r}, where the sink writes a "
                f"{self._kind}. Nothing of this part is written. Rename or delete that key"
            )
        if answer[0] == b"full":
            key = answer[1].decode(errors="replace")
            self._refuse(f"holds a stream {key!r} whose last id is the last there can be. Rename that key")
        return answer

    def _check_durable(self, about: Mapping[str, str]) -> None:
        instead = "or give the sink durable=False, where it is no loss if the server forgets"
        if about.get("aof_enabled") != "1":
            self._refuse(f"keeps no log of what it writes (appendonly no). Set appendonly yes, {instead}")
        setting = self._server.optional("CONFIG", "GET", "appendfsync")
        if setting and setting[1] == b"no":
            self._refuse(f"never waits for its disk (appendfsync no). Set appendfsync to always or everysec, {instead}")

    def _check_rights(self) -> None:
        wanted = APPLY[self._kind].commands
        if self._server.optional("COMMAND", "INFO", "waitaof") not in (None, [None]) and self._durable:
            wanted = (*wanted, *DURABLE_RIGHTS)
        missing = [each.decode() for each in self._server.run(RIGHTS, [f"{self._prefix}check".encode()], wanted)]
        if missing:
            rights = " ".join(dict.fromkeys(f"+{each.split()[0].lower()}" for each in missing))
            self._refuse(
                f"does not allow the sink's user all that it needs: NOPERM. An administrator can allow it by ACL "
                f"SETUSER <user> {rights} ~{self._prefix}* (and the sink's keys)"
            )

    def _wait_for_disk(self) -> None:
        """Return when what this connection wrote is on the server's disk; at once where the server cannot tell."""
        if not self._can_wait:
            return
        milliseconds = max(1, int(self._timeout_s * 1000 * 0.8))
        try:
            answer = self._server.command("WAITAOF", 1, 0, milliseconds)
        except StoreError as refused:
            if "unknown command" not in str(refused):
                raise
            self._can_wait = False
            return
        if answer[0] < 1:
            raise StoreUnavailable(
                f"{self._server.where} has not brought what was written onto its disk within {milliseconds} ms: the "
                f"disk is slow, or appendfsync is no. Nothing is lost; it is tried again."
            )

    def _fenced(self, found: Any, incarnation: int) -> NoReturn:
        raise Fenced(
            f"The ledger in {self._server.where} has incarnation {int(found)}, this is {incarnation}: a newer instance "
            f"of this pipeline has taken over. This one ends; nothing is lost."
        )

    def _refuse(self, why: str) -> NoReturn:
        raise StoreError(f"{self._server.where} {why}.")


def _checkpoints(held: Mapping[bytes, bytes]) -> dict[int, int]:
    """By subtask, the checkpoint that a ledger has."""
    suffix = b":checkpoint"
    return {int(name.removesuffix(suffix)): int(held[name]) for name in held if name.endswith(suffix)}


def _parsed(info: bytes) -> dict[str, str]:
    """The lines of INFO."""
    return dict(line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)
