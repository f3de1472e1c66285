"""The offsets of a read: the user's bounds against the present topics.

Invariants: offsets are resolved once, on the driver, before a record is read; "latest" is the last stable offset, so
that no range ends within an open transaction; missing records are an error, or left out if the user allows it
(`failOnDataLoss` false); topics are compared by id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from exactlyonce.connectors.kafka.errors import RangeGone
from exactlyonce.connectors.kafka.topics import EARLIEST, LATEST, Topic, Topics
from exactlyonce.engines.spark.source.read_options import Bound, ReadOptions
from exactlyonce.pipeline.errors import ConfigError, TopicError


@dataclass(frozen=True)
class LaterOutput:
    """The output of later checkpoints, which may lie among that of the checkpoint that is read."""

    first: int
    """No record of it, and of no open transaction, is before this offset."""
    writers: frozenset[tuple[int, int]]
    """Producer id and epoch of each of its transactions."""
    log_end: int
    """All markers of the checkpoint are before this offset, also those of records in other parts of the range."""


@dataclass(frozen=True)
class Range:
    """Offsets [start, end) of one partition."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    later: LaterOutput | None = None
    """None: all committed records are read."""

    @property
    def size(self) -> int:
        """The number of offsets; there may be fewer records."""
        return max(0, self.end - self.start)


@dataclass(frozen=True)
class TopicContents:
    """The offsets of a topic for readers of committed records."""

    name: str
    topic_id: str
    first: Mapping[int, int]
    end: Mapping[int, int]
    """The last stable offsets."""

    def only(self, partitions: Iterable[int]) -> TopicContents:
        """The *partitions* of the topic alone."""
        wanted = sorted(partitions)
        if unknown := [partition for partition in wanted if partition not in self.end]:
            raise ConfigError(
                f"assign names partitions {unknown} of {self.name!r}, which has {sorted(self.end)}. Correct it."
            )
        first, end = ({partition: offsets[partition] for partition in wanted} for offsets in (self.first, self.end))
        return replace(self, first=first, end=end)


def contents_of(topics: Topics, names: Iterable[str]) -> dict[str, TopicContents]:
    """Each topic at present; `TopicError` for a missing one."""
    return _contents(topics, topics.describe(names).values())


def _contents(topics: Topics, described: Iterable[Topic]) -> dict[str, TopicContents]:
    by_name = {topic.name: topic for topic in described}
    spans = topics.spans(by_name.values())
    return {name: TopicContents(name, by_name[name].topic_id, span.first, span.end) for name, span in spans.items()}


def subscribed(options: ReadOptions, topics: Topics) -> dict[str, TopicContents]:
    """The topics to read at present, by name; of a pattern maybe none. `TopicError` for a missing one."""
    if options.pattern is not None:
        return _matching(options, topics)
    now = contents_of(topics, sorted(options.topics))
    if options.assigned is None:
        return now
    return {name: topic.only(options.assigned[name]) for name, topic in now.items()}


def _matching(options: ReadOptions, topics: Topics) -> dict[str, TopicContents]:
    matching = [topic for name, topic in sorted(topics.all().items()) if options.matches(name)]
    with suppress(TopicError):  # one was deleted after the list was made
        return _contents(topics, matching)
    left: dict[str, TopicContents] = {}
    for topic in matching:
        try:
            left |= _contents(topics, [topic])
        except TopicError:
            if topics.facts(topic.name) is not None:
                raise
    return left


def resolve_all(bound: Bound, topics: Topics, now: Mapping[str, TopicContents]) -> dict[str, dict[int, int]]:
    """The offset of every partition of the topics *now*."""
    if missing := sorted(set(bound.by_partition or ()) - set(now)):
        raise ConfigError(
            f"{bound.option} names the topic {missing[0]}, and the cluster has no such topic. Correct it."
        )
    return {name: resolve(bound, topics, topic) for name, topic in now.items()}


def resolve(bound: Bound, topics: Topics, topic: TopicContents) -> dict[int, int]:
    """The offset of every partition. At a time: the first record of that time or later, else the end."""
    wanted: Mapping[int, int] = dict.fromkeys(topic.first, bound.number)
    if bound.by_partition is not None:
        wanted = bound.by_partition.get(topic.name, {})
    if set(wanted) != set(topic.first):
        raise ConfigError(
            f"{bound.option} names partitions {sorted(wanted)} of {topic.name!r}, which has {sorted(topic.first)}. "
            f"Name each of them, with -2 for the earliest offset and -1 for the latest."
        )
    if bound.timestamps:
        at = {time_ms: topics.offsets_at(topic.name, time_ms) for time_ms in set(wanted.values())}
        # not beyond the end, which was asked for before
        return {partition: min(at[time_ms][partition], topic.end[partition]) for partition, time_ms in wanted.items()}
    named = {EARLIEST: topic.first, LATEST: topic.end}
    return {partition: named[n][partition] if n in named else n for partition, n in wanted.items()}


class Selection(Protocol):
    """A choice among the records of topics."""

    def require_known(self, names: Sequence[str]) -> None:
        """Raise ConfigError for a topic of which nothing can be chosen."""

    def ranges(self, wanted: Sequence[Range], now: Mapping[str, TopicContents], topics: Topics) -> list[Range]:
        """The chosen parts of *wanted*."""


def ranges_between(options: ReadOptions, topics: Topics, selection: Selection | None = None) -> list[Range]:
    """The ranges of a batch: at least one, if only an empty one."""
    now = subscribed(options, topics)
    if selection is not None:
        selection.require_known(sorted(now))
    if not now:
        raise ConfigError(f"The cluster has no topic that subscribePattern {options.pattern!r} matches. Correct it.")
    starts, ends = (resolve_all(bound, topics, now) for bound in (options.start, options.end))
    ranges: list[Range] = []
    for name, topic in now.items():
        for partition, start in sorted(starts[name].items()):
            wanted = Range(name, topic.topic_id, partition, start, ends[name][partition])
            if wanted.start > wanted.end:
                raise ConfigError(
                    f"{wanted.topic}[{partition}] is to be read from offset {start} ({options.start.option}) to offset "
                    f"{wanted.end} ({options.end.option}), which lies before it."
                )
            ranges.append(available(wanted, topic, options.fail_on_data_loss))
    if selection is not None:
        ranges = selection.ranges(ranges, now, topics)
    return split([range_ for range_ in ranges if range_.size], options.partitions_min) or ranges[:1]


def available(wanted: Range, topic: TopicContents, fail_on_data_loss: bool) -> Range:
    """*wanted*, or its part in the topic; `RangeGone` if that is less, unless the user allows it."""
    first, end = topic.first.get(wanted.partition, 0), topic.end.get(wanted.partition, 0)
    if wanted.start == wanted.end <= end or first <= wanted.start <= wanted.end <= end:
        return wanted
    if fail_on_data_loss:
        raise RangeGone(
            f"Input is missing: {wanted.topic}[{wanted.partition}] is to be read from offset {wanted.start} to "
            f"{wanted.end - 1}, but readers can see offsets {first} to {end - 1} of it: retention took the rest, the "
            f"log was truncated, an open transaction holds readers back, or the offsets are wrong. {CHOICES}"
        )
    return replace(wanted, start=min(max(wanted.start, first), end), end=min(wanted.end, end))


CHOICES = "Give offsets that are there, or failOnDataLoss=false to read what is left."


def split(ranges: Sequence[Range], partitions_min: int) -> list[Range]:
    """*ranges* in at least *partitions_min* parts of about the same size, if there are as many offsets.

    >>> [(part.start, part.end) for part in split([Range("t", "", 0, 0, 90), Range("t", "", 1, 0, 10)], 4)]
    [(0, 22), (22, 45), (45, 67), (67, 90), (0, 10)]
    """
    total = sum(whole.size for whole in ranges)
    if len(ranges) >= partitions_min or not total:
        return list(ranges)
    parts = []
    for whole in ranges:
        count = min(whole.size, -(-whole.size * partitions_min // total))
        cuts = [whole.start + whole.size * number // count for number in range(count + 1)]
        parts += [replace(whole, start=start, end=end) for start, end in pairwise(cuts)]
    return parts


def shares(ranges: Sequence[Range], offsets_max: int | None) -> list[Range]:
    """*ranges*, cut to *offsets_max* in all: each in proportion to its size, and at least one.

    >>> [cut.size for cut in shares([Range("t", "", 0, 0, 90), Range("t", "", 1, 0, 9), Range("t", "", 2, 5, 6)], 12)]
    [9, 2, 1]
    """
    sizes = [whole.size for whole in ranges]
    if offsets_max is None or sum(sizes) <= offsets_max:
        return list(ranges)
    waiting = sorted((place for place, size in enumerate(sizes) if size), key=sizes.__getitem__, reverse=True)
    cut_sizes = dict.fromkeys(waiting[:offsets_max], 1)
    spare, rest, counted = offsets_max - len(cut_sizes), sum(sizes) - len(waiting), 0
    for place in cut_sizes if spare else ():
        cut_sizes[place] += (counted + sizes[place] - 1) * spare // rest - counted * spare // rest
        counted += sizes[place] - 1
    return [replace(whole, end=whole.start + cut_sizes.get(place, 0)) for place, whole in enumerate(ranges)]


def require_same_topic(now: TopicContents | Topic, topic_id: str) -> None:
    """Raise `RangeGone` if the topic has another id than *topic_id*."""
    if now.topic_id != topic_id:
        raise RangeGone(
            f"Topic {now.name!r} was deleted and made anew: its id was {topic_id}, now it is {now.topic_id}. "
            f"Offsets noted before mean nothing in it. Run the query again; a stream, with a new checkpoint location."
        )
