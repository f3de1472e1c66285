"""The Redis store: committables applied in parts, each with its ledger entry in one step.

Invariants: a part is applied only to the ledger that was judged for it, and changes the ledger in the same step; so one
that lands late, twice, or on a server that went back, changes nothing. A call returns once the server has its writes on
disk, if the server can tell (WAITAOF).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from exactlyonce.pipeline.errors import ASKED_AGAIN, StoreError, StoreUnavailable
from exactlyonce.sinks.ledger import LedgerBehind, LedgerEntry, SinkLedger
from exactlyonce.sinks.redis.connection import RedisConnection
from exactlyonce.sinks.redis.rows import Part, Parts, RedisEncoder, argument
from exactlyonce.sinks.redis.scripts import APPLY, FENCE, RIGHTS, TOUCH, WRITE, Script, ledger_key, ledger_prefix

TIMEOUT_S = 30.0
"""The limit for an answer; a server that is busy with a part answers much sooner."""
DURABLE_RIGHTS = ("WAITAOF 1 0 0",)


class _Held(NamedTuple):
    """The ledger as a script finds it: the sink's writer, and the position of one subtask."""

    origin: bytes = b""
    incarnation: bytes = b"0"
    checkpoint: bytes = b"0"
    part: bytes = b""


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
        """See `Store`: the server must be durable, and the user may write. Creates nothing."""
        about = _parsed(self._server.command("INFO"))
        if about.get("loading") == "1":  # INFO answers all the same, and says of the log of writes that it is off
            raise self._server.away("LOADING")
        if about.get("role") in ("slave", "replica"):
            self._refuse("is a replica, which takes no writes. Give the address of the primary")
        if about.get("cluster_enabled") == "1" and self._tag is None:
            self._refuse(
                "is part of a cluster, where a script may write only to one server. Give the sink a "
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
        """See `InspectableStore`: `check` creates nothing."""
        self.check()

    def ledger_of(self, pipeline: str, sink: str) -> SinkLedger:
        return _ledger_of(self._server.command("HGETALL", self._ledger_key(pipeline, sink)))

    def encoder(self) -> RedisEncoder:
        """See `Store`; the server is not asked."""
        return self._encoder

    def fence(self, pipeline: str, sink: str, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Store`. Scripts run one by one: an apply that comes later finds another ledger than was judged."""
        ledger = SinkLedger()
        while True:
            fenced = ledger.fenced(pipeline, sink, incarnation, origin)
            held = _Held(ledger.origin.encode(), b"%d" % ledger.incarnation)
            head: list[str | bytes | int] = ["", *held, fenced.incarnation, fenced.origin]
            answer, result = self._server.run(FENCE, [self._ledger_key(pipeline, sink)], head)
            if answer == b"done":
                self._wait_for_disk()
                return _ledger_of(result).checkpoints
            held = _Held(*result)
            ledger = SinkLedger(incarnation=int(held.incarnation), origin=held.origin.decode())

    def apply(self, chunks: Iterable[bytes], entry: LedgerEntry) -> bool:
        """See `Store`. Each part of *part_rows* rows is one step; a retry goes on after the last applied part."""
        key = self._ledger_key(entry.pipeline, entry.sink)
        parts = Parts(chunks, self._kind, self._part_rows)
        held = _Held(entry.origin.encode(), b"%d" % entry.incarnation, b"%d" % entry.previous)  # as it should be
        while True:
            is_due = entry.is_due(
                checkpoint=int(held.checkpoint), incarnation=int(held.incarnation), origin=held.origin.decode()
            )
            head: list[bytes | int] = [entry.subtask, *held, entry.incarnation]
            applied = b""
            if is_due:
                part = self._next_part(parts, held, entry)
                if not part.is_last:
                    applied = b"%d %d" % (entry.checkpoint, part.after)
                answer = self._run(APPLY[self._kind], part, [key], [*head, entry.checkpoint, applied])
            else:
                answer = self._server.run(TOUCH, [key], head)
            if answer[0] == b"changed":
                held = _Held(*answer[1])
            elif applied:
                held = held._replace(part=applied)
            else:
                self._wait_for_disk()
                return is_due

    def _next_part(self, parts: Parts, held: _Held, entry: LedgerEntry) -> Part:
        """The first rows that the ledger does not have. `LedgerBehind` if another checkpoint is partly applied."""
        checkpoint, applied = map(int, held.part.split()) if held.part else (entry.checkpoint, 0)
        if checkpoint != entry.checkpoint:
            raise LedgerBehind(int(held.checkpoint))
        if applied < parts.first:
            raise StoreUnavailable(
                f"{self._server.where} has lost rows of checkpoint {entry.checkpoint} that it had answered for: it was "
                f"started again, or another has taken its place. They are applied again."
            )
        parts.advance(applied)
        return parts.current()

    def write(self, chunks: Iterable[bytes]) -> None:
        """See `Store`; each part of *part_rows* rows is one step."""
        parts = Parts(chunks, self._kind, self._part_rows)
        while True:
            part = parts.current()
            if part.rows:
                self._run(WRITE[self._kind], part)
            if part.is_last:
                break
            parts.advance(part.after)
        self._wait_for_disk()

    def close(self) -> None:
        self._server.close()

    def _ledger_key(self, pipeline: str, sink: str) -> bytes:
        return ledger_key(pipeline, sink, self._tag).encode()

    def _run(
        self, script: Script, part: Part, ledger: Sequence[bytes] = (), head: Sequence[str | bytes | int] = ()
    ) -> list[Any]:
        """The answer of a script that writes *part*; `StoreError` if a key cannot take it."""
        rows = [*self._before_rows, *part.arguments]
        count = len(self._before_rows) + part.argument_count
        answer: list[Any] = self._server.run(script, [*ledger, *part.keys], head, rows, count)
        if answer[0] == b"type":
            _, key, kind = answer
            self._refuse(
                f"holds a {kind.decode()} under the key {key.decode(errors='replace')!r}, where the sink writes a "
                f"{self._kind}. Nothing of this part is written. Rename or delete that key"
            )
        if answer[0] == b"full":
            key = answer[1].decode(errors="replace")
            self._refuse(f"holds a stream {key!r} whose last id is the last there can be. Rename that key")
        return answer

    def _check_durable(self, about: Mapping[str, str]) -> None:
        instead = "or give the sink durable=False, where it is no loss if the server forgets"
        if about.get("aof_enabled") != "1":
            self._refuse(f"keeps no log of its writes (appendonly no). Set appendonly yes, {instead}")
        setting = self._server.optional("CONFIG", "GET", "appendfsync")
        if setting and setting[1] == b"no":
            self._refuse(f"never waits for its disk (appendfsync no). Set appendfsync to always or everysec, {instead}")

    def _check_rights(self) -> None:
        wanted = APPLY[self._kind].commands
        if self._server.optional("COMMAND", "INFO", "waitaof") not in (None, [None]) and self._durable:
            wanted = (*wanted, *DURABLE_RIGHTS)
        missing = [right.decode() for right in self._server.run(RIGHTS, [f"{self._prefix}check".encode()], wanted)]
        if missing:
            rights = " ".join(dict.fromkeys(f"+{right.split()[0].lower()}" for right in missing))
            self._refuse(
                f"does not allow the sink's user all that it needs: NOPERM. An administrator can allow it by ACL "
                f"SETUSER <user> {rights} ~{self._prefix}* (and the sink's keys)"
            )

    def _wait_for_disk(self) -> None:
        """Wait until this connection's writes are on the server's disk; not if the server cannot tell."""
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
                f"disk is slow, or appendfsync is no. {ASKED_AGAIN}"
            )

    def _refuse(self, why: str) -> NoReturn:
        raise StoreError(f"{self._server.where} {why}.")


def _ledger_of(answer: list[bytes]) -> SinkLedger:
    """The ledger in the answer of HGETALL."""
    fields = dict(zip(answer[::2], answer[1::2], strict=True))
    suffix = b":checkpoint"
    return SinkLedger(
        incarnation=int(fields.get(b"incarnation", 0)),
        origin=fields.get(b"origin", b"").decode(),
        checkpoints={int(name.removesuffix(suffix)): int(fields[name]) for name in fields if name.endswith(suffix)},
    )


def _parsed(info: bytes) -> dict[str, str]:
    """The lines of INFO."""
    return dict(line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)
