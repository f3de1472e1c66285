"""One source subtask: reads its partitions of a topic from exact offsets.

Invariants: all visible records before `offsets`, and none after, have been returned; at the end of a partition they
have passed its markers and aborted records, too, so that nothing lags there; partitions are assigned and sought, never
subscribed; a removed offset is an error, never a reset.

librdkafka retries silently without end while a broker is away: its statistics show it (`Silence`), and tell a silent
broker from one without new records, which answers twice a second. Sometimes it never fetches again from a broker that
is back (librdkafka #5153, of 2.16 too): so a reader whom silence lasts too long goes on with another consumer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import Any, NamedTuple, cast

import msgspec
from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, Message, TopicPartition

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.confluent import LOGGER, make_consumer
from exactlyonce.connectors.kafka.errors import Meaning, meaning_of, raise_unless_passing
from exactlyonce.connectors.source import Divide
from exactlyonce.pipeline.errors import Halt, TopicError

INTERVAL_MS = 5_000
SILENT_AFTER_S = 30.0
"""The time from the first sign of silence until a partition is reported. It is silent if it has no known leader, or is
not fetched, or if the broker that it is fetched from, which may be a follower, is not connected, or has sent nothing
for as long while the client asks."""
REPLACED_AFTER_S = 60.0
"""After so much silence a consumer is replaced, and again after as much: where brokers are away, it does no harm."""

Place = tuple[str, int]
"""Topic and partition."""
_NO_BROKER = -1
_FETCHES = "active"


class _Broker(msgspec.Struct):
    nodeid: int
    state: str
    rxidle: int = -1
    """Microseconds since the last answer; -1: none yet on this connection."""


class _Partition(msgspec.Struct):
    leader: int
    broker: int
    """The one from which it is fetched."""
    fetch_state: str
    fetchq_cnt: int


class _Topic(msgspec.Struct):
    partitions: dict[str, _Partition]


class _Statistics(msgspec.Struct):
    brokers: dict[str, _Broker]
    topics: dict[str, _Topic]


_decode = msgspec.json.Decoder(_Statistics).decode


class Silence:
    """Listens to the statistics of a consumer, by the callback in `settings`. *places* gives topic and partition of all
    that it reads now."""

    def __init__(self, places: Callable[[], Iterable[Place]], clock: Callable[[], float] = time.monotonic) -> None:
        self._places, self._clock = places, clock
        self._heard_s = self._replaced_s = 0.0
        self._missed_since_s: dict[Place, float] = {}

    @property
    def settings(self) -> dict[str, Any]:
        return {"statistics.interval.ms": INTERVAL_MS, "stats_cb": self.hear}

    def hear(self, statistics: str) -> None:
        """Take in statistics; called while the consumer is polled."""
        self._heard_s, missed = self._clock(), self._missed(_decode(statistics))
        self._missed_since_s = {place: self._missed_since_s.get(place, self._heard_s) for place in missed}

    @property
    def missed(self) -> Collection[Place]:
        """The partitions that show any sign of silence, as of the last statistics."""
        return self._missed_since_s.keys()

    @property
    def partitions(self) -> dict[Place, float]:
        """The silent partitions, and for how many seconds, as of the last statistics."""
        silent = {place: self._heard_s - since_s for place, since_s in self._missed_since_s.items()}
        return {place: silent_s for place, silent_s in silent.items() if silent_s >= SILENT_AFTER_S}

    @property
    def is_lasting(self) -> bool:
        """Whether some silence has lasted for `REPLACED_AFTER_S`, since the consumer was replaced, too."""
        since_s = min(self._missed_since_s.values(), default=inf)
        return self._heard_s - max(since_s, self._replaced_s) >= REPLACED_AFTER_S

    def replaced(self) -> None:
        """There is another consumer."""
        self._replaced_s = self._clock()

    def _missed(self, statistics: _Statistics) -> set[Place]:
        known = {
            (name, int(number)): partition
            for name, topic in statistics.topics.items()
            for number, partition in topic.partitions.items()
        }
        brokers = {broker.nodeid: broker for broker in statistics.brokers.values() if broker.nodeid >= 0}
        # With records in its queue it may have enough, and ask for no more.
        asks = not any(partition.fetchq_cnt for partition in known.values())
        return {place for place in self._places() if self._is_missed(known.get(place), brokers, asks)}

    @staticmethod
    def _is_missed(partition: _Partition | None, brokers: dict[int, _Broker], asks: bool) -> bool:
        if partition is None or partition.leader == _NO_BROKER:
            return True
        broker = brokers.get(partition.broker)
        if broker is None or broker.state != "UP" or partition.fetch_state != _FETCHES:
            return True
        return asks and not 0 <= broker.rxidle < SILENT_AFTER_S * 1_000_000


_partition = cast("Callable[[Message], int]", Message.partition)
offset_of = cast("Callable[[Message], int]", Message.offset)
"""A consumed message always has both."""

FETCHED_BYTES_MAX, LITTLE_BYTES = 64 << 20, 1 << 20
"""What is fetched and not yet returned, where a batch is divided among partitions: with so much, those that have more
than a little are paused until they have less."""
MESSAGE_BYTES = 300
"""About what a message takes beside its value."""
LOOK_RECORDS, LOOKS_MAX = 2_000, 5
"""So many messages are fetched at a time, and so often in one `poll`, in search of partitions that have none: however
small a batch is, they may be behind thousands of others."""
FETCH_BACKOFF_MS = 10
"""The pause of the client after a full queue. Its default of a second starves a fast loop."""
ASK_TIMEOUT_S = 1.0
"""The longest time for which no record is read because leaders are asked for the ends of partitions."""
HALT_TIMEOUT_S = 10.0
"""The longest time for which a leader is asked what is left of a partition, for an error that names it."""


class Consumers(NamedTuple):
    """The settings and the factory of the consumers of a source's subtask."""

    config: Mapping[str, str]
    """librdkafka settings."""
    make: Callable[[Mapping[str, Any]], Consumer]


def exact_consumer(config: Mapping[str, Any]) -> Consumer:
    """A consumer of committed records, from assigned offsets only, with checked CRCs."""
    return make_consumer(
        {
            "group.id": "exactlyonce",
            "isolation.level": "read_committed",
            "fetch.queue.backoff.ms": FETCH_BACKOFF_MS,
            **config,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "check.crcs": True,
        }
    )


class FetchBuffer:
    """What was fetched and not returned, where a batch is divided. It does no I/O: the reader pauses and resumes."""

    def __init__(self) -> None:
        self.messages: dict[int, list[Message]] = {}
        """By partition, of those that have any; to be read only."""
        self._bytes = Counter[int]()
        """By partition."""
        self.paused = set[int]()
        """The partitions of which nothing is fetched now: enough is."""

    @property
    def counts(self) -> dict[int, int]:
        """The number of messages by partition."""
        return {split: len(messages) for split, messages in self.messages.items()}

    @property
    def has_enough(self) -> bool:
        """Whether no more needs to be fetched, unless a partition has none."""
        return self._is_full or sum(map(len, self.messages.values())) >= 2 * LOOK_RECORDS

    @property
    def _is_full(self) -> bool:
        return self._bytes.total() >= FETCHED_BYTES_MAX

    def add(self, messages: Sequence[Message], runs: Iterable[tuple[int, int]]) -> None:
        """Keep *messages*, whose (split, count) are *runs*."""
        end = 0
        for split, count in runs:
            end += count
            more = messages[end - count : end]
            self.messages.setdefault(split, []).extend(more)
            self._bytes[split] += _size_of(more)

    def take(self, runs: Iterable[tuple[int, int]]) -> list[Message]:
        """Take out the first messages of each split, as many as *runs* say."""
        taken: list[Message] = []
        for split, count in runs:
            messages = self.messages[split]
            first = messages[:count]
            self._bytes[split] -= _size_of(first)
            taken += first
            del messages[:count]
            if not messages:
                del self.messages[split]
        return taken

    def pause(self) -> set[int]:
        """The partitions to pause: those that have more than a little, if all have much. The client forgets what more
        it had fetched of them."""
        more = self._with_more_than_little - self.paused if self._is_full else set[int]()
        self.paused |= more
        return more

    def resume(self) -> set[int]:
        """The partitions to resume: paused ones of which little is left."""
        few = self.paused - self._with_more_than_little
        self.paused -= few
        return few

    @property
    def _with_more_than_little(self) -> set[int]:
        return {split for split, size in self._bytes.items() if size >= LITTLE_BYTES}


@dataclass
class KafkaReader:
    """Reads *topic*; `poll` hands out messages in order within each partition, whose topic is *place*."""

    source: str
    topic: str
    place: str = field(kw_only=True, default="")
    """The `SourceOffset.topic`: a name with the cluster; empty: it is the topic."""
    offsets: dict[int, int]
    """Sn by partition: `poll` has returned the visible records before it."""
    targets: Mapping[int, int]
    """The offset by partition at which this source is finished; empty: never."""
    config: Mapping[str, str]
    """librdkafka settings."""
    topic_id: str = field(kw_only=True)
    """Empty as long as no partition is read."""
    epochs: dict[int, int] = field(default_factory=dict)
    """The leader epoch by partition of the last record, visible or not, before `offsets`, if known."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(partition, count) of the last batch, in order."""
    make: Callable[[Mapping[str, Any]], Consumer] = exact_consumer
    divide: Divide | None = field(kw_only=True, default=None)
    """Chooses the records of each batch, of those that were fetched; None: they are returned as they come."""
    _consumer: Consumer | None = None
    _unfinished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.place = self.place or self.topic
        self._silence = Silence(lambda: map(self.place_of, self.offsets.keys() - self._buffer.paused))
        self._at_end = set[int]()
        """The partitions whose end the client has met, and of which it has fetched nothing since."""
        self._met: dict[int, int] = {}
        """The end of those of them that `offsets` has not passed."""
        self._buffer = FetchBuffer()

    def open(self) -> None:
        self._unfinished = {p for p, target in self.targets.items() if p in self.offsets and self.offsets[p] < target}
        if self.offsets:
            self._assign(self.offsets)

    def add(self, start: SourceOffset) -> None:
        if start.partition not in self.offsets:
            self.topic_id = start.topic_id
            self.offsets[start.partition] = start.offset
            self._assign([start.partition])

    def place_of(self, split: int) -> tuple[str, int]:
        """The topic and the partition of a split, which has its number."""
        return self.topic, split

    def name_of(self, topic: str) -> str:
        """The name in errors of a topic that it reads."""
        return self.place

    def split_of(self, topic: str | None, partition: int | None) -> int | None:
        """The split of a partition; None: there is no such."""
        return partition

    def splits_of(self, messages: Iterable[Message]) -> list[int]:
        """The split of each message."""
        return list(map(_partition, messages))

    def _assign(self, partitions: Iterable[int]) -> None:
        """Assign more partitions; fetched records of others stay. By its epoch the client detects a truncated log."""
        if self._consumer is None:
            self._consumer = self.make({**self.config, **self._silence.settings})
        self._consumer.incremental_assign(
            [
                TopicPartition(*self.place_of(split), self.offsets[split], leader_epoch=self.epochs.get(split, -1))
                for split in partitions
            ]
        )

    def _replace_client(self) -> None:
        """Go on with another consumer after what was returned."""
        LOGGER.warning("%s, with another consumer", self.waiting)
        self._client.close()
        self._consumer, self._buffer = None, FetchBuffer()
        self._at_end.clear()
        self._met.clear()
        self._assign(self.offsets)
        self._silence.replaced()

    def finalized(self, positions: Sequence[SourceOffset]) -> None:
        """Topics are kept by their retention, whoever has read them."""

    def positions(self) -> tuple[SourceOffset, ...]:
        return tuple(
            SourceOffset(self.source, self.place, self.topic_id, partition, offset, self.epochs.get(partition, -1))
            for partition, offset in sorted(self.offsets.items())
        )

    @property
    def idle(self) -> bool:
        return not self.offsets

    @property
    def finished(self) -> bool:
        return bool(self.targets) and not self._unfinished

    @property
    def _client(self) -> Consumer:
        """The consumer, once a partition is read."""
        assert self._consumer is not None
        return self._consumer

    def poll(self, records_max: int, timeout_s: float) -> Sequence[Any]:
        """Up to *records_max* messages; waits up to *timeout_s* for the first. Sets `runs` and moves `offsets`."""
        self.runs = []
        if self._consumer is None:
            return []
        if self._silence.is_lasting:
            self._replace_client()
        if self.divide is None:
            messages, runs = self._fetch(records_max, timeout_s)
        else:
            messages, runs = self._divided(self.divide, records_max, timeout_s)
        end = 0
        for partition, count in runs:
            end += count
            self.runs.append((partition, count))
            offset = self.offsets[partition] = offset_of(messages[end - 1]) + 1
            self.epochs[partition] = epoch_of(messages[end - 1])
            if partition in self._unfinished and offset >= self.targets[partition]:
                self._unfinished.discard(partition)
        if passed := [split for split in self._met if split not in self._buffer.messages]:
            self._pass_invisible(passed)
        return at_place(messages, self.topic, self.place)

    def _divided(
        self, divide: Divide, records_max: int, timeout_s: float
    ) -> tuple[list[Message], list[tuple[int, int]]]:
        """The messages that *divide* chooses of those that were fetched, and their runs."""
        buffer, missing = self._buffer, self._missing_splits()
        for look in range(LOOKS_MAX):
            if not missing and (look or buffer.has_enough):
                break
            messages, runs = self._fetch(LOOK_RECORDS, timeout_s if look == 0 else 0.0)
            buffer.add(messages, runs)
            if more := buffer.pause():
                self._client.pause(self._partitions(more))
            missing = self._missing_splits()
            if not messages:
                break
        runs = divide(buffer.counts, missing, records_max)
        chosen = buffer.take(runs)
        if few := buffer.resume():
            self._client.resume(self._partitions(few))
        return chosen, runs

    def _partitions(self, splits: Iterable[int]) -> list[TopicPartition]:
        return [TopicPartition(*self.place_of(split)) for split in splits]

    def _missing_splits(self) -> list[int]:
        """The partitions without a fetched message that are not known to be at their end."""
        fetched = self._buffer.messages
        return [
            split
            for split in self.offsets
            if split not in fetched and split not in self._at_end and not self._is_read(split)
        ]

    def _is_read(self, split: int) -> bool:
        """Whether all visible records of a partition were returned, as far as is known without a request."""
        return 0 <= self._known_end(split) <= self.offsets[split]

    def _known_end(self, split: int) -> int:
        """The end of a partition, as far as it is known without a request; less than 0: it is not."""
        _, end = self._client.get_watermark_offsets(TopicPartition(*self.place_of(split)), cached=True)
        return end

    def _fetch(self, records_max: int, timeout_s: float) -> tuple[list[Message], list[tuple[int, int]]]:
        """The next messages of the client, and their runs."""
        messages = self._client.consume(records_max, timeout_s)
        ends: list[tuple[Message, int]] = []
        if any(map(Message.error, messages)):
            messages = self._without_events(messages, ends)
        runs = _runs(self.splits_of(messages))
        if self._at_end:
            for split, _ in runs:
                self._at_end.discard(split)
                self._met.pop(split, None)
        for end, before in ends:
            (split,) = self.splits_of([end])
            if split not in self.splits_of(messages[before:]):
                self._at_end.add(split)
                self._met[split] = offset_of(end)
        return messages, runs

    def _pass_invisible(self, splits: Sequence[int]) -> None:
        """Go on after markers and aborted records at the ends of partitions, as the client has done."""
        for split, passed in zip(splits, self._client.position(self._partitions(splits)), strict=True):
            if passed.offset > self.offsets[split]:
                self.offsets[split] = passed.offset
                self.epochs[split] = -1 if passed.leader_epoch is None else passed.leader_epoch
            if self._met.pop(split) >= self.targets.get(split, 0):
                self._unfinished.discard(split)

    def _without_events(self, messages: list[Message], ends: list[tuple[Message, int]]) -> list[Message]:
        """*messages* that are records. *ends* gets the ends of partitions, each with the number of records before."""
        kept: list[Message] = []
        for message in messages:
            error = message.error()
            if error is None:
                kept.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                ends.append((message, len(kept)))
            else:
                self._raise(error, message, kept)
        return kept

    def _raise(self, error: KafkaError, message: Message, before: list[Message]) -> None:
        """Raise an error that needs a person; librdkafka retries the others. *before* came before it, and is not
        returned if it is raised."""
        topic, partition = message.topic() or self.topic, message.partition()
        where = self.name_of(topic) if partition is None or partition < 0 else f"{self.name_of(topic)}[{partition}]"
        split = self.split_of(topic, partition)
        before = [*self._buffer.messages.get(-1 if split is None else split, ()), *before]
        last = next((offset_of(m) for m in reversed(before) if (m.topic(), m.partition()) == (topic, partition)), None)
        read = self.offsets.get(-1 if split is None else split, min(self.offsets.values()))
        wanted = read if last is None else last + 1
        if meaning_of(error) is Meaning.REMOVED:
            raise self._missing(topic, partition or 0, wanted)
        if meaning_of(error) is Meaning.MISSING:
            raise TopicError(
                f"Source {self.source!r}: topic {where} does not exist (any more). Create it, then run again."
            )
        group = str(self.config.get("group.id", "exactlyonce"))
        raise_unless_passing(error, f"Source {self.source!r}: {where}", wanted, error.str(), group)

    def _missing(self, topic: str, partition: int, wanted: int) -> Halt:
        """The error for a log without offset *wanted*: its beginning was removed, or it was truncated."""
        where, known = f"{self.name_of(topic)}[{partition}]", self._watermarks(topic, partition)
        if known is None:
            happened = (
                "that offset is gone, and no broker has told which offsets the topic holds. Retention removed it, or "
                "the log was truncated, or the topic was recreated; so the pipeline stops."
            )
            return self._halt(topic, partition, wanted, happened)
        first, end = known
        if wanted < first:
            happened = (
                f"retention has removed older ones.\n"
                f"  Records {wanted} to {first - 1} of {where} would be lost, so the pipeline stops."
            )
        else:
            happened = (
                f"records below {wanted}, which were read, are gone: the log was truncated (unclean leader election, a "
                f"disk that lost writes), or the topic was recreated.\n"
                f"  New records may have their offsets, and would be skipped, so the pipeline stops."
            )
        return self._halt(topic, partition, wanted, f"the topic holds offsets {first} to {end - 1} now: {happened}")

    def _halt(self, topic: str, partition: int, wanted: int, happened: str) -> Halt:
        return Halt(
            f"Source {self.source!r} must go on at {self.name_of(topic)}[{partition}] offset {wanted}, but {happened}\n"
            f"  Choices: restore the topic from a replica or backup and run again; or `exactlyonce reset` and "
            f"recompute from the existing input.",
            operator=self.source,
            topic=self.name_of(topic),
            partition=partition,
            offset=wanted,
        )

    def _watermarks(self, topic: str, partition: int) -> tuple[int, int] | None:
        """The first offset and the end, as the leader says now; None: it does not answer."""
        try:
            first, end = self._client.get_watermark_offsets(TopicPartition(topic, partition), timeout=HALT_TIMEOUT_S)
        except KafkaException:
            return None
        return first, end

    def quiet(self, ask: Collection[int] = ()) -> set[int]:
        if self._consumer is None:
            return set()
        quiet = set[int]()
        for split in self.offsets:
            if self.place_of(split) not in self._silence.missed and self._is_read(split):
                quiet.add(split)
        asked = sorted(quiet & {*ask})
        ends = self._ends(asked) if asked else []
        return quiet - {split for split, end in zip(asked, ends, strict=True) if not 0 <= end <= self.offsets[split]}

    def _ends(self, splits: Sequence[int]) -> list[int]:
        """The ends of the partitions, as their leaders say now; -1: one does not answer. A leader answers after
        the fetch that waits there, so one request asks it about all of its partitions."""
        latest = [TopicPartition(*self.place_of(split), OFFSET_END) for split in splits]
        try:
            known = self._client.offsets_for_times(latest, ASK_TIMEOUT_S)
        except KafkaException:
            return [-1] * len(splits)
        return [partition.offset if partition.error is None else -1 for partition in known]

    @property
    def waiting(self) -> str:
        """The silent partitions, and for how long; empty if there are none."""
        silent = self._silence.partitions
        if not silent:
            return ""
        where = ", ".join(f"{self.name_of(topic)}[{partition}]" for topic, partition in sorted(silent))
        return (
            f"source {self.source!r} has waited {max(silent.values()):.0f} s for an answer from the broker of {where}, "
            f"and goes on trying"
        )

    def lags(self) -> dict[tuple[str, int], int]:
        """The offsets up to the end of each partition, as far as it is known without a request; 0 at the end."""
        if self._consumer is None:
            return {}
        lags = {}
        for split, offset in self.offsets.items():
            topic, partition = self.place_of(split)
            end = max(self._known_end(split), self.targets.get(split, 0))
            lags[self.name_of(topic), partition] = max(0, end - offset)
        return lags

    def logs(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()


def at_place(messages: list[Message], topic: str, place: str) -> list[Message]:
    """*messages* of *topic*, which from here on is called *place*: so a record of another cluster is told apart."""
    if place != topic:
        for message in messages:
            message.set_topic(place)  # type: ignore[attr-defined]  # not in the library's stubs
    return messages


def epoch_of(message: Message) -> int:
    """The leader epoch of a record; -1: unknown."""
    epoch = message.leader_epoch()
    return -1 if epoch is None else epoch


def _size_of(messages: Sequence[Message]) -> int:
    """About the memory of *messages*, in bytes."""
    return sum(map(len, messages)) + MESSAGE_BYTES * len(messages)


def _runs(partitions: list[int]) -> list[tuple[int, int]]:
    """Run lengths; most batches are of one partition.

    >>> _runs([3, 3, 1])
    [(3, 2), (1, 1)]
    """
    if partitions and partitions.count(partitions[0]) == len(partitions):
        return [(partitions[0], len(partitions))]
    return [(partition, len(list(group))) for partition, group in groupby(partitions)]
