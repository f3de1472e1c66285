"""The stop offsets of bounded work, and the ranges up to them.

Invariants: an end is exclusive, and never beyond the last stable offset; ranges name every partition of every source,
even empty ones, so that they end in a whole Sn; the parts of a range are adjacent, in order, and complete. A split of a
source that reads no topic is read to its end, which nobody knows before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import FindsSplits
from exactlyonce.engines.bounded.unit.messages import Reading
from exactlyonce.engines.bounded.unit.ordering import OPEN_READERS_MAX
from exactlyonce.engines.external_checks.preflight import Inputs, Offsets
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.positions import LATEST_OFFSET, TO, Group, Position

ENDLESS = 1 << 62


def stop_offsets(to: Position, inputs: Inputs, starts: Offsets) -> dict[str, dict[int, int]]:
    """The ends at *to*, one of `TO`, by source and partition; *starts* are the offsets where the work stands."""
    patterns = inputs.patterns
    refused: Collection[str] = ()
    if isinstance(to, Group | Mapping):
        refused = inputs.others.keys()
    elif isinstance(to, datetime):
        refused = inputs.others.keys() - patterns
    if refused:
        raise ConfigError(
            f"Source {min(refused)!r} reads no one topic, so it has no offsets or times to go to, and is "
            f"read to its end. Leave out --to, or write --to latest."
        )
    places = {source.place for source in inputs.sources.values()}
    if isinstance(to, Mapping) and (unread := to.keys() - places):
        raise ConfigError(f"No source reads {min(unread)}, so it needs no end. Read are: {', '.join(sorted(places))}.")
    moment_ms = int(to.timestamp() * 1000) if isinstance(to, datetime) else None
    ends = {id: inputs.latest(starts[id].values(), moment_ms) for id in patterns}
    for id, source in inputs.sources.items():
        topics = inputs.topics.of(source)
        seen = topics.end_offsets(source.topic, committed=True)
        latest = {partition: end for partition, end in seen.items() if partition in starts[id]}
        match to:
            case Group(group):
                reached = topics.start_offsets(source.topic) | source.group_offsets(id, topics, group, TO.setting)
                ends[id] = _named(reached, source.place, starts[id], latest)
            case Mapping():
                ends[id] = _named(to.get(source.place, {}), source.place, starts[id], latest)
            case _:
                ends[id] = latest if moment_ms is None else topics.offsets_at(source.topic, moment_ms)
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
        end = ends[partition] = latest[partition] if offset == LATEST_OFFSET else offset
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
