"""The stop offsets of bounded work, and the ranges up to them.

Invariants: an end is exclusive, and never beyond the last stable offset; ranges name every partition of every source,
even empty ones, so that they end in a whole Sn; the parts of a range are adjacent, in order, and complete. A split of a
source that reads no topic is read to its end, which nobody knows before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import FindsSplits
from exactlyonce.engines.bounded.unit.messages import Reading
from exactlyonce.engines.bounded.unit.ordering import OPEN_READERS_MAX
from exactlyonce.engines.external_checks.preflight import Inputs, Offsets
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.moments import moment_of
from exactlyonce.pipeline.names import group_named

ENDLESS = 1 << 62
LATEST = -1
"""Spark's number for the latest offset."""
_decoder = msgspec.json.Decoder(dict[str, dict[str, int]])


@dataclass(frozen=True)
class StopOffsets:
    """`latest`, or *offsets* by topic and partition, or *moment*: records before it, or those of a consumer *group*."""

    offsets: Mapping[str, Mapping[int, int]] | None = None
    moment: datetime | None = None
    group: str | None = None

    @classmethod
    def of(cls, to: object) -> StopOffsets:
        """The end that a program gives: text as for `parse`, a datetime with a time zone, or offsets as a dict.

        >>> StopOffsets.of({"orders": {0: 120, "1": -1}}).offsets
        {'orders': {0: 120, 1: -1}}
        """
        if isinstance(to, str):
            return cls.parse(to)
        if isinstance(to, datetime):
            if to.tzinfo is None:
                raise ConfigError(f"to={to!r} has no time zone: give tzinfo, as timezone.utc.")
            return cls(moment=to)
        if isinstance(to, Mapping):
            try:
                return cls(offsets=msgspec.convert(to, dict[str, dict[int, int]], strict=False))
            except msgspec.ValidationError as error:
                raise ConfigError(
                    f'to={to!r:.200} names no offsets: write {{"orders": {{0: 120, 1: -1}}}}, by topic and partition, '
                    f"where -1 is the latest: {error}."
                ) from None
        raise ConfigError(
            f'to={to!r:.100} is no place to go to: give "latest", a time as a datetime or as text, or offsets by topic '
            f'and partition, as {{"orders": {{0: 120, 1: -1}}}}, where -1 is the latest.'
        )

    @classmethod
    def parse(cls, text: str) -> StopOffsets:
        """Parse an option of the command line.

        >>> StopOffsets.parse('{"orders": {"0": 120, "1": -1}}').offsets
        {'orders': {0: 120, 1: -1}}
        >>> StopOffsets.parse("2026-11-01").moment
        datetime.datetime(2026, 11, 1, 0, 0, tzinfo=datetime.timezone.utc)
        >>> StopOffsets.parse("group:legacy-app").group
        'legacy-app'
        """
        if text == "latest":
            return cls()
        if text.startswith("{"):
            return cls(offsets=_offsets(text))
        if (group := group_named(text)) is not None:
            return cls(group=group)
        if (moment := moment_of(text)) is None:
            raise ConfigError(
                f"{text!r} is no place to go to: write latest, a time as 2026-11-01T00:00:00Z, a day as 2026-11-01, "
                f"group:NAME for the offsets of a consumer group, or offsets by topic and partition as "
                f'{{"orders": {{"0": 120, "1": -1}}}}, where -1 is the latest.'
            )
        return cls(moment=moment)

    def ends(self, inputs: Inputs, starts: Offsets) -> dict[str, dict[int, int]]:
        """The ends by source and partition; *starts* are the offsets where the work stands."""
        patterns = inputs.patterns
        refused = set() if self.offsets is None and self.group is None else {*inputs.others}
        refused |= set() if self.moment is None else inputs.others.keys() - patterns
        if refused:
            raise ConfigError(
                f"Source {min(refused)!r} reads no one topic, so it has no offsets or times to go to, and is "
                f"read to its end. Leave out --to, or write --to latest."
            )
        moment_ms = None if self.moment is None else int(self.moment.timestamp() * 1000)
        ends = {id: inputs.latest(starts[id].values(), moment_ms) for id in patterns}
        for id, source in inputs.sources.items():
            topics = inputs.topics.of(source)
            seen = topics.end_offsets(source.topic, committed=True)
            latest = {partition: end for partition, end in seen.items() if partition in starts[id]}
            if self.offsets is not None:
                ends[id] = _named(self.offsets.get(source.place, {}), source.place, starts[id], latest)
            elif self.group is not None:
                committed = source.starting("earliest", self.group).first_offsets(id, topics)
                ends[id] = _named(committed, source.place, starts[id], latest)
            elif moment_ms is not None:
                ends[id] = topics.offsets_at(source.topic, moment_ms)
            else:
                ends[id] = latest
        return ends


def _named(
    named: Mapping[int, int], topic: str, starts: Mapping[int, SourceOffset], latest: Mapping[int, int]
) -> dict[int, int]:
    """The *named* ends of *topic*; ConfigError where they cannot be reached."""
    if named.keys() != latest.keys():
        wanted = ", ".join(map(str, sorted(latest)))
        raise ConfigError(f"Every partition of {topic} needs an end: {wanted}; -1 stands for the latest.")
    ends = {}
    for partition, offset in named.items():
        end = ends[partition] = latest[partition] if offset == LATEST else offset
        if end > latest[partition]:
            raise ConfigError(
                f"{topic}[{partition}] ends at offset {latest[partition]} for readers, and it is to be read up to "
                f"{end}: that lies beyond the end. Name {latest[partition]} at most, or -1."
            )
        if end < starts[partition].offset:
            raise ConfigError(
                f"{topic}[{partition}] is read up to offset {starts[partition].offset} already, which cannot be taken "
                f"back to {end}. Name {starts[partition].offset} or more."
            )
    return ends


def _offsets(text: str) -> dict[str, dict[int, int]]:
    try:
        named = _decoder.decode(text)
        return {topic: {int(p): offset for p, offset in partitions.items()} for topic, partitions in named.items()}
    except ValueError as error:  # msgspec's errors are such, too
        raise ConfigError(
            f'Offsets are written as {{"topic": {{"0": 120, "1": -1}}}}, by topic and partition: {error}.'
        ) from None


def readings(
    starts: Offsets, ends: Mapping[str, Mapping[int, int]], others: Mapping[str, FindsSplits] = MappingProxyType({})
) -> tuple[Reading, ...]:
    """Every partition from its start to its end, by source and partition; the splits of *others* to theirs.

    A partition beyond its end, or without one, has an empty range.
    """

    def is_guessed(source: str, start: SourceOffset) -> bool:
        return source in others and start.in_cluster is None and not others[source].grows

    def end(source: str, start: SourceOffset) -> int:
        if source in others and start.in_cluster is None:
            return start.offset + others[source].left(start)
        return max(start.offset, ends.get(source, {}).get(start.partition, start.offset))

    return tuple(
        Reading(
            source, start.topic, start.topic_id, partition, start.offset, end(source, start),
            is_guessed(source, start),
        )
        for source, offsets in sorted(starts.items())
        for partition, start in sorted(offsets.items())
    )  # fmt: skip


def to_their_ends(ranges: Sequence[Reading]) -> tuple[Reading, ...]:
    """*ranges* without guesses: splits are read to their ends, however many records they have."""
    return tuple(
        msgspec.structs.replace(reading, end=ENDLESS) if reading.to_end and reading.length else reading
        for reading in ranges
    )


def rest(ranges: Sequence[Reading], part: Sequence[Reading], reached: Iterable[SourceOffset]) -> tuple[Reading, ...]:
    """What is left of *ranges* once *part*, a beginning of all, has *reached* these offsets.

    A split that has more records than was guessed may have twice as many.
    """
    positions = {(position.source, position.partition): position for position in reached}

    def left(reading: Reading, done: Reading) -> Reading:
        position, end = positions[reading.source, reading.partition], reading.end
        if done.to_end and done.length:
            end = position.offset if position.ended else max(end, 2 * position.offset)
        return msgspec.structs.replace(reading, start=position.offset if done.to_end else done.end, end=end)

    return tuple(map(left, ranges, part))


def first_part(ranges: Sequence[Reading], records_max: int, splits_max: int = OPEN_READERS_MAX) -> tuple[Reading, ...]:
    """The beginning of *ranges*, of at most about *records_max* offsets; never empty unless *ranges* are.

    Every partition advances by the same share of its range, so that the times of records stay together. Splits that are
    read to their end come one after the other: as many as make up the share, and *splits_max* at most.

    >>> [(reading.start, reading.end) for reading in first_part([Reading("s", "t", "id", 0, 10, 15)], 2)]
    [(10, 12)]
    """
    count = max(1, -(-sum(reading.length for reading in ranges) // records_max))
    share = -(-sum(reading.length for reading in ranges if reading.to_end) // count)
    part = []
    for reading in ranges:
        length = -(-reading.length // count)
        if reading.to_end:
            length = min(reading.length, records_max) if share > 0 and splits_max > 0 else 0
            share, splits_max = share - length, splits_max - (length > 0)
        part.append(msgspec.structs.replace(reading, end=reading.start + length))
    return tuple(part)
