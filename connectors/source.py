"""The seam between an engine and a source: who reads its splits from exact positions, and decodes what was read.

A split is an ordered part of a source that is read by one subtask: of a topic, a partition. A position is data, which
manifests hold: a `SourceOffset` names source, topic with its id, split, and the offset of the first record that was not
handed out.

Invariants: records of a split are handed out in order, each once; `positions`, between two calls of `poll`, are exactly
behind what was handed out, never behind what was fetched; a reader that is opened at a position hands out what comes
next, or raises: a position that is not there any more is an error, never a reset. `testing/source_contract/` asks all
of it of any source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from exactlyonce.checkpoint.records.manifest import SourceOffset


class RawRecord(Protocol):
    """A record as it was read, which says where it lies; all else of it only its source knows."""

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...


class ReaderClients(Protocol):
    """What a reader reaches the world by."""

    def consumers(self, topic: str) -> Any:
        """The `connectors.kafka.reader.Consumers` of a source's subtask that reads *topic*."""


@dataclass(frozen=True, kw_only=True)
class ReaderContext:
    """What a reader is made of, beside the description of its source."""

    source: str
    positions: Sequence[SourceOffset]
    """Where each split of the subtask begins."""
    topic_id: str
    """Of what is read: the splits that are added later are of the same."""
    targets: Mapping[int, int]
    """By split, of all subtasks, the offset at which the source is finished; empty: it never is."""
    clients: ReaderClients


class SourceReader(Protocol):
    """Reads the splits of one subtask, for as long as that runs. It belongs to the loop of one worker."""

    @property
    def runs(self) -> Sequence[tuple[int, int]]:
        """(split, count) of what `poll` handed out last, in its order."""

    def open(self) -> None:
        """Connect, and go to the positions. A removed position may show here, or in `poll`."""

    def add(self, partition: int, offset: int) -> None:
        """Read another split too, from *offset* on; nothing happens if it is read already."""

    def poll(self, records_max: int, timeout_s: float) -> list[Any]:
        """The next records, as `RawRecord`: *records_max* at most. Waits up to *timeout_s* for the first.

        Raises `Halt` where the records that come next are not there any more, `TopicError` where the source is gone.
        What passes by itself, as a broker that is away, is waited for.
        """

    def positions(self) -> tuple[SourceOffset, ...]:
        """Sn: where each split stands, in their order. It is asked at every barrier, between two batches: splits that
        begin at the barrier have been added, and nothing else need be done before one."""

    @property
    def idle(self) -> bool:
        """Whether there is nothing to wait for: no split is read here."""

    @property
    def finished(self) -> bool:
        """Whether every split here has reached its target; False for an unbounded source."""

    @property
    def waiting(self) -> str:
        """What has not answered for a while, and for how long; else empty."""

    def lag(self) -> int:
        """Records that readers may see and that were not handed out yet, as far as is known without asking."""

    def close(self) -> None:
        """Leave; nothing is committed."""


@dataclass(frozen=True, kw_only=True)
class RangeContext:
    """What a reader of a range is made of, beside the description of its source."""

    start: SourceOffset
    end: int
    client: Mapping[str, Any]
    """How the cluster is reached: librdkafka's settings."""
    kilobytes: int
    """What may be fetched ahead."""


class SplitReader(Protocol):
    """Reads a range of one split, for bounded work."""

    def read(self, records_max: int) -> list[Any]:
        """The next records, as `RawRecord`: 1 to *records_max*; none: the range is finished. Raises as
        `SourceReader.poll`, and `BrokerUnavailable` where nothing comes for long."""

    def position(self) -> SourceOffset:
        """Where it stands; once the range is finished, at its end."""

    def close(self) -> None:
        """Leave; may be called more than once."""


class RecordDecoder(Protocol):
    """Turns raw records of one source into records of its type. Engines map `decode` over `parts`: no call more than
    the codec's is made for a record."""

    @property
    def decode(self) -> Callable[[Any], Any]:
        """Of one part. What it raises is the record's fault, but for an outage; see `engines.runtime.outage`."""

    def parts(self, records: list[Any]) -> Sequence[Any]:
        """What `decode` takes of each of *records*."""

    def problem(self, record: Any, error: BaseException) -> str:
        """Why *record* was refused, for the message that also says where it lies."""

    def time_ms(self, record: Any) -> int:
        """When it came to be."""


class Readable(Protocol):
    """What every description of a source can do, beside describing."""

    @property
    def on_error(self) -> Literal["fail", "skip"]:
        """What to do with a record that does not decode."""

    @property
    def topic(self) -> str:
        """What is read: the `SourceOffset.topic` of its positions."""

    def first_offsets(self, source: str, topics: Any) -> dict[int, int]:
        """By split, where a pipeline without a checkpoint begins; *topics*: `connectors.kafka.topics.Topics`."""

    def open_reader(self, context: ReaderContext) -> SourceReader:
        """The reader of one subtask; nothing is connected yet."""

    def open_range(self, context: RangeContext) -> SplitReader:
        """The reader of a range; nothing is connected yet."""

    def decoder(self) -> RecordDecoder:
        """Of what both read."""
