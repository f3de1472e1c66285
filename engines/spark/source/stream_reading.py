"""The streaming read: micro-batches with exact ranges, journaled by Spark in its checkpoint location.

Invariants: an offset names each topic's id and, by partition, where the next batch begins, in one canonical order, as
Spark compares texts; a batch that is run again has the same ranges; a partition that is added is read from its
beginning; what was lost, by retention, truncation or a topic made anew, is an error unless the user allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from exactlyonce.connectors.kafka.range_reader import RangeGone
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.spark.source.ranges import (
    Held,
    Range,
    available,
    held,
    require_same_topic,
    resolve,
    shares,
    split,
)
from exactlyonce.engines.spark.source.read_options import ReadOptions
from exactlyonce.engines.spark.source.reading import record_batches, require_schema
from exactlyonce.pipeline.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class TopicOffsets(msgspec.Struct, frozen=True):
    """Where the next batch begins in one topic."""

    topic_id: str
    offsets: Mapping[int, int]
    """By partition."""


Offsets = dict[str, TopicOffsets]
"""By topic."""


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream of some topics. Spark keeps one on the driver while the query runs, and sends another to the tasks."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        require_schema(options, schema)
        self._options = options
        self._topics: Topics | None = None
        self._target: Offsets | None = None
        """Where a query of what is available now ends."""

    def initialOffset(self) -> dict[str, Any]:
        """Where a query without a checkpoint begins."""
        now = self._held()
        return _encoded(
            {
                name: TopicOffsets(topic.topic_id, resolve(self._options.start, self._asked(), topic))
                for name, topic in now.items()
            }
        )

    def getDefaultReadLimit(self) -> ReadLimit:
        """As `maxOffsetsPerTrigger` says."""
        most = self._options.offsets_per_trigger_max
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Whatever comes from here on is left for another query."""
        self._target = _ends(self._held())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Where the batch that begins at *start* ends; *start* itself if nothing is there."""
        now = self._held()
        ranges = self._ranges(_decoded(start), self._target or _ends(now), now)
        found: dict[str, dict[int, int]] = {name: {} for name in now}
        for each in shares(ranges, limit.max_rows if isinstance(limit, ReadMaxRows) else None):
            found[each.topic][each.partition] = each.end
        ends = {name: TopicOffsets(topic.topic_id, found[name]) for name, topic in now.items()}
        return _encoded(_decoded(start) | ends)  # whatever is subscribed to no more may be again

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """One task for each range of a batch."""
        ranges = [each for each in self._ranges(_decoded(start), _decoded(end), self._held()) if each.size]
        return [InputPartition(each) for each in split(ranges, self._options.partitions_min)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return record_batches(self._options, partition.value)

    def stop(self) -> None:
        if self._topics is not None:
            self._topics.close()

    def _ranges(self, begin: Offsets, end: Offsets, now: Mapping[str, Held]) -> list[Range]:
        """From *begin* to *end*, as far as the topics still hold it."""
        lossless = self._options.fail_on_data_loss
        if lossless:
            _require_subscribed(begin, end, now)
        ranges = []
        for name, topic in now.items():
            if name not in end:  # subscribed to since the batch was planned
                continue
            starts = self._starts(begin.get(name), topic)
            if lossless:
                require_same_topic(topic, end[name].topic_id)
            elif topic.topic_id != end[name].topic_id:  # all of the batch is gone; what is there now is of the next one
                continue
            for partition, until in sorted(end[name].offsets.items()):
                start = starts.get(partition, 0)
                ranges.append(available(Range(name, topic.topic_id, partition, start, until), topic, lossless))
        return ranges

    def _starts(self, begin: TopicOffsets | None, topic: Held) -> Mapping[int, int]:
        """A topic that a query has not read before begins at its earliest offsets."""
        if begin is None:
            return topic.first
        try:
            require_same_topic(topic, begin.topic_id)
        except RangeGone:
            if self._options.fail_on_data_loss:
                raise
            return topic.first
        return begin.offsets

    def _held(self) -> dict[str, Held]:
        return held(self._asked(), sorted(self._options.topics))

    def _asked(self) -> Topics:
        if self._topics is None:
            config = self._options.client()
            config.check()
            self._topics = Topics(config)
        return self._topics


def _require_subscribed(begin: Offsets, end: Offsets, now: Mapping[str, Held]) -> None:
    """Raise if a batch that is run again has records of a topic that is not read any more."""
    for name, until in end.items():
        if name not in now and (begin.get(name) is None or begin[name] != until):
            raise RangeGone(
                f"Topic {name!r} is not subscribed to any more, and records of it are in a batch that was planned and "
                f"is not known to be done. Subscribe to it until that is; or set failOnDataLoss to false to leave them "
                f"out."
            )


def _ends(now: Mapping[str, Held]) -> Offsets:
    return {name: TopicOffsets(topic.topic_id, topic.end) for name, topic in now.items()}


def _encoded(offsets: Offsets) -> dict[str, Any]:
    encoded: dict[str, Any] = msgspec.to_builtins(dict(sorted(offsets.items())), str_keys=True)
    return encoded


def _decoded(offsets: dict[str, Any]) -> Offsets:
    try:
        return msgspec.convert(offsets, Offsets, str_keys=True)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"The checkpoint location has offsets that this source did not write ({error}). Give the query a "
            f"location of its own."
        ) from None
