"""The seam between an engine and a source: a reader of splits from exact positions, and a decoder of records.

A split is an ordered part of a source that one subtask reads, as a partition of a topic. A position is data in
manifests: a `SourceOffset` has source, place (a topic), identity (its id), split, and the offset of the first record
not yet returned. Splits have numbers, which are never used again; offsets grow, by one for each record unless some are
missing. So what is replayed, audited, skipped or compared is named by (place, split, offset), whatever the source.

Invariants: records of a split are returned in order, each once; between two calls of `poll`, `positions` are those of
the returned records, never of the fetched ones; a reader opened at a position returns the next records or raises: a
removed position is an error, never a reset. `testing/source_contract.py` checks this for any source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.pipeline.dead_letters import DeadLetter, OnError
from exactlyonce.pipeline.source import EventTime


class TableRead(msgspec.Struct):
    """A table whose rows are read page by page beside its changes."""

    table: str
    page: int
    """The page at hand, from 1 on."""
    pages: int
    """About so many, by the server's estimate of the rows."""


class LogRead(msgspec.Struct, kw_only=True):
    """How far a split is in its server's log, and what the server keeps for it. None: not known."""

    name: str
    """The slot, or the log."""
    lag_ms: int | None = None
    """The age of the oldest commit that may be unread, by the server's clock; 0: all was read."""
    lag_bytes: int | None = None
    kept_bytes: int | None = None
    safe_bytes: int | None = None
    """What may be written before the server removes log that is still needed; None: no limit is known."""
    status: str = ""
    """The server's word for it, as "reserved"."""
    problem: str = ""
    """What is wrong with it, as a sentence without its full stop; empty: nothing is known."""
    tables: list[TableRead] = []
    """Those that are still read in pages."""


class RawRecord(Protocol):
    """A record as read, with its place; only its source knows the rest."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...


class ReaderClients(Protocol):
    """The factory of a reader's clients."""

    def consumers(self, topic: str, client: Any = None) -> Any:
        """The `connectors.kafka.reader.Consumers` of a subtask that reads *topic*; *client*: see `ReadsTopic`."""


Divide = Callable[[Mapping[int, int], Collection[int], int], list[tuple[int, int]]]
"""Chooses the records of a batch: (fetched count by split, splits with none that may have more, records_max) -> (split,
count)."""


@dataclass(frozen=True, kw_only=True)
class ReaderContext:
    """The arguments of a reader."""

    source: str
    positions: Sequence[SourceOffset]
    """The start of each split of the subtask."""
    targets: Mapping[int, int] | None
    """The offset by split, of all subtasks, at which the source is finished, unless the split ends before; None: only
    the end of all splits finishes it."""
    clients: ReaderClients
    divide: Divide | None = None
    """Chooses the records of each batch, for a reader that fetches ahead from several splits; it may be ignored. None:
    records are returned as they come."""


class SourceReader(Protocol):
    """Reads the splits of one subtask. It belongs to the loop of one worker."""

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        """(split, count) of the last records of `poll`, in their order."""

    def open(self) -> None:
        """Connect, and go to the positions. A removed position may raise here, or in `poll`."""

    def add(self, start: SourceOffset) -> None:
        """Read another split too, from *start* on; nothing happens if it is read already. If it has ended, it is gone
        from the source: leave it out of the positions from now on."""

    def poll(self, records_max: int, timeout_s: float) -> Sequence[Any]:
        """The next records, as `RawRecord`: *records_max* at most. Waits up to *timeout_s* for the first.

        Raises `Halt` if the next records were removed, `TopicError` if the source is gone. Waits out an outage.
        """

    def positions(self) -> tuple[SourceOffset, ...]:
        """Sn: the position of each split, in their order, at a barrier between two batches."""

    def finalized(self, positions: Sequence[SourceOffset]) -> None:
        """A checkpoint with these *positions* is finalized: what lies before them is never read again."""

    @property
    def idle(self) -> bool:
        """Whether no split is read here."""

    @property
    def finished(self) -> bool:
        """Whether every split here has reached its target or its end, and no other will come."""

    def quiet(self, ask: Collection[int] = ()) -> Collection[int]:
        """The splits of which every record that is known to be there was returned by `poll`; not those that have ended,
        and none whose server does not answer. The servers of *ask* are asked now, if the reader may not have heard."""

    @property
    def waiting(self) -> str:
        """The servers that have not answered for a while, and for how long; else empty."""

    def lags(self) -> Mapping[tuple[str, int], int]:
        """The visible records not yet returned, as far as is known without a request, by topic and partition; of other
        sources by the place and the number of each split that is open. Nobody counts the records of a log: a split of
        `logs` is not among them."""

    def logs(self) -> Sequence[LogRead]:
        """The splits that read a server's log, as of the last few seconds."""

    def close(self) -> None:
        """Close the connections; nothing is committed."""


@dataclass(frozen=True, kw_only=True)
class RangeContext:
    """The arguments of a reader of a range."""

    start: SourceOffset
    end: int
    to_end: bool = False
    """Whether the range is finished at the end of its split, too; else a split that ends before *end* is an error."""
    client: Mapping[str, Any]
    """librdkafka's settings."""
    kilobytes: int
    """The queue of fetched records."""


class SplitReader(Protocol):
    """Reads a range of one split, for bounded work."""

    def read(self, records_max: int) -> list[Any]:
        """The next records, as `RawRecord`: 1 to *records_max*; none: the range is finished. Raises as
        `SourceReader.poll`, and `BrokerUnavailable` after a long silence."""

    def position(self) -> SourceOffset:
        """The present position; at the end of a finished range, its end."""

    def close(self) -> None:
        """Close the connections; may be called more than once."""


class RecordDecoder(Protocol):
    """Turns raw records of one source into records of its type. Engines map `decode` over `parts`, so that each record
    costs only the codec's call."""

    @property
    def decode(self) -> Callable[[Any], Any]:
        """Decodes one part. An exception is the record's fault, except an outage; see `engines.runtime.faults`."""

    def parts(self, records: Sequence[Any]) -> Sequence[Any]:
        """The argument of `decode` for each of *records*."""

    def problem(self, record: Any, error: BaseException) -> str:
        """The reason why *record* was refused, without its place."""

    def letter(self, record: Any) -> DeadLetter:
        """*record* as it is, for the dead letters of a source that has some."""

    def times_ms(self, records: Sequence[Any]) -> Iterable[int]:
        """The timestamp of each of *records*."""


class Readable(Protocol):
    """The part of a source's description that engines use."""

    @property
    def on_error(self) -> OnError:
        """The treatment of a record that does not decode."""

    @property
    def event_time(self) -> EventTime[Any] | None:
        """The event time of its records, if they have one."""

    @property
    def place(self) -> str:
        """The `SourceOffset.topic` of its positions: a topic, or a name with a colon."""

    def open_reader(self, context: ReaderContext) -> SourceReader:
        """The reader of one subtask; nothing is connected yet."""

    def open_range(self, context: RangeContext) -> SplitReader:
        """The reader of a range; nothing is connected yet."""

    def decoder(self) -> RecordDecoder:
        """The decoder of the records of both readers."""


class ReadsTopic(Readable, Protocol):
    """A source that reads a topic of Kafka; its splits are the partitions."""

    @property
    def topic(self) -> str:
        """Its name in its cluster. It is the place, too, unless the source has a `client` of its own."""

    @property
    def client(self) -> Any:
        """The `ClientConfig` of the topic's cluster; None: the cluster of the checkpoints."""

    def first_offsets(self, source: str, topics: Any) -> dict[int, int]:
        """The first offset by partition of a pipeline without a checkpoint; *topics*: the `Topics` of its cluster."""

    def group_offsets(self, source: str, topics: Any, group: str, setting: str) -> dict[int, int]:
        """The offset by partition at which a consumer *group* goes on, where it has one; *source* is the id, *setting*
        the one that names the group, for errors."""

    def starting(self, start: Any) -> ReadsTopic:
        """The same source with the `first_offsets` of *start*, as `KafkaSource` takes it."""


class SplitFinder(Protocol):
    """Finds the splits of a source that reads no topic, for the leader of a run. It belongs to one thread.

    The positions that it is shown are of the newest checkpoint: a database need not keep what lies before them.
    """

    def find(self, known: Sequence[SourceOffset]) -> Sequence[SourceOffset]:
        """The starts of the splits that are not among *known*, with numbers above theirs; at the start, and at every
        checkpoint. A known one that has ended may be among them as it is: it is gone, and checkpoints need not name it
        any more. The one with the highest number only together with a start above it, so that no number is used again.

        Raises `Halt` if a known split has changed, or is gone before its end."""

    def close(self) -> None:
        """Close the connections."""


class FindsSplits(Readable, Protocol):
    """A source that reads no topic, or all topics of a pattern."""

    @property
    def looks_at(self) -> str:
        """The place, and what of it is read, for people."""

    @property
    def repeats(self) -> bool:
        """Whether a number has the same record whenever a split is read. Else no record can be left out by its number,
        and `open_range` raises Halt, but where a range is read for the first time, `to_end`."""

    @property
    def grows(self) -> bool:
        """Whether records may be added to a split of it, which reads no topic: then `left` is exact."""

    def left(self, position: SourceOffset) -> int:
        """The records from *position* to the end of its split, for bounded work; a guess where they are not known, 0
        only if there are none. Raises ConfigError if bounded work cannot read the source. A partition of a topic has
        its end in the cluster instead."""

    def finder(self, source: str, topics: Any) -> SplitFinder:
        """The finder for source *source*; nothing is connected yet. *topics*: the `Topics` of the cluster."""
