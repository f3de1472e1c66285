"""The stop offsets of bounded work: the latest stable ones, named ones, or those of a moment.

Invariants: an end is exclusive, and never behind what a read_committed reader can see now; stop offsets have the
partitions that are known where the work stands. One that appears while it is looked for is read from 0 once it is
known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import msgspec

from exactlyonce.engines.surroundings.preflight import Inputs, Offsets
from exactlyonce.pipeline.errors import ConfigError

LATEST = -1
"""In place of an offset, as Spark writes it."""
_decoder = msgspec.json.Decoder(dict[str, dict[str, int]])


@dataclass(frozen=True)
class StopOffsets:
    """`latest`, or *offsets* by topic and partition, or *moment*: records before it."""

    offsets: Mapping[str, Mapping[int, int]] | None = None
    moment: datetime | None = None

    @classmethod
    def parse(cls, text: str) -> StopOffsets:
        """As it is written on the command line.

        >>> StopOffsets.parse('{"orders": {"0": 120, "1": -1}}').offsets
        {'orders': {0: 120, 1: -1}}
        >>> StopOffsets.parse("2026-11-01T00:00:00Z").moment
        datetime.datetime(2026, 11, 1, 0, 0, tzinfo=datetime.timezone.utc)
        """
        if text == "latest":
            return cls()
        if text.startswith("{"):
            return cls(offsets=_offsets(text))
        try:
            moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
        except ValueError:
            raise ConfigError(
                f"{text!r} is no place to go to: write latest, a time as 2026-11-01T00:00:00Z, or offsets by topic and "
                f'partition as {{"orders": {{"0": 120, "1": -1}}}}, where -1 is the latest.'
            ) from None
        if moment.tzinfo is None:
            raise ConfigError(f"{text!r} has no time zone: append Z for UTC, or an offset as +01:00.")
        return cls(moment=moment)

    def ends(self, inputs: Inputs, starts: Offsets) -> Offsets:
        """By source and partition, where to stop; *starts* is where its partitions stand."""
        ends: Offsets = {}
        for source, each in inputs.sources.items():
            seen = inputs.topics.end_offsets(each.topic, committed=True)
            latest = {partition: end for partition, end in seen.items() if partition in starts[source]}
            if self.offsets is not None:
                ends[source] = self._named(each.topic, starts[source], latest)
            elif self.moment is not None:
                ends[source] = inputs.topics.offsets_at(each.topic, int(self.moment.timestamp() * 1000))
            else:
                ends[source] = latest
        return ends

    def _named(self, topic: str, starts: Mapping[int, int], latest: Mapping[int, int]) -> dict[int, int]:
        named = (self.offsets or {}).get(topic, {})
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
            if end < starts[partition]:
                raise ConfigError(
                    f"{topic}[{partition}] is read up to offset {starts[partition]} already, which cannot be taken "
                    f"back to {end}. Name {starts[partition]} or more."
                )
        return ends


def _offsets(text: str) -> dict[str, dict[int, int]]:
    try:
        found = _decoder.decode(text)
        return {topic: {int(p): offset for p, offset in partitions.items()} for topic, partitions in found.items()}
    except ValueError as error:  # of msgspec as well
        raise ConfigError(
            f'Offsets are written as {{"topic": {{"0": 120, "1": -1}}}}, by topic and partition: {error}.'
        ) from None
