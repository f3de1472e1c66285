"""Positions in the inputs, as people and programs write them: one grammar for `--until`, `--to` and `--offsets`. Pure.

Invariant: a text means the same everywhere; a setting takes some forms, and names them when it refuses another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NamedTuple, TypeAlias

import msgspec

from exactlyonce.pipeline.errors import ConfigError

RUNNING, LATEST, EARLIEST, START = "running", "latest", "earliest", "start"
TIME, GROUP, OFFSETS = "a time", "a consumer group", "offsets"
_WRITTEN = {
    RUNNING: "running",
    LATEST: "latest",
    EARLIEST: "earliest",
    START: "start (where each source says itself)",
    TIME: "a time as 2026-11-01T00:00:00Z, a day as 2026-11-01",
    GROUP: "group:NAME (the offsets of a consumer group without members)",
    OFFSETS: 'offsets by topic and partition as {"orders": {"0": 120, "1": -1}}, where -1 is the latest',
}
"""How each form is written."""
_GROUP = "group:"
LATEST_OFFSET = -1
"""Spark's number for the latest offset."""


class Group(NamedTuple):
    """The offsets of a consumer group."""

    name: str

    def __str__(self) -> str:
        return f"{_GROUP}{self.name}"


Position: TypeAlias = str | datetime | Group | Mapping[str, Mapping[int, int]]
"""One of the words, an aware time, a group, or offsets by topic and partition, which may be `LATEST_OFFSET`."""


@dataclass(frozen=True)
class Positions:
    """The forms that *setting* takes; *instead* is what to do for others."""

    setting: str
    forms: tuple[str, ...]
    instead: str = ""

    def __str__(self) -> str:
        """How to write them.

        >>> str(Positions("start", (EARLIEST, LATEST, TIME)))
        'earliest, latest, a time as 2026-11-01T00:00:00Z, a day as 2026-11-01'
        """
        return ", ".join(_WRITTEN[form] for form in self.forms)

    def read(self, given: object) -> Position:
        """The position that *given* is or writes. Raises `ConfigError`.

        >>> TO.read("group:legacy-app"), TO.read("2026-11-01") == TO.read("2026-11-01T00:00:00Z")
        (Group(name='legacy-app'), True)
        >>> TO.read('{"orders": {"0": 120}}'), TO.read({"orders": {0: 120}})
        ({'orders': {0: 120}}, {'orders': {0: 120}})
        """
        try:
            position = _read(given)
        except _NoPosition as reason:
            raise ConfigError(f"{self.setting} is {given!r:.200}{reason}. Write one of: {self}.") from None
        if (form := _form(position)) not in self.forms:
            named = "" if form == given else f", {form}"
            raise ConfigError(f"{self.setting} is {given!r:.200}{named}. Write one of: {self}. {self.instead}".rstrip())
        return position


def _form(position: Position) -> str:
    match position:
        case str():
            return position
        case datetime():
            return TIME
        case Group():
            return GROUP
    return OFFSETS


class _NoPosition(ValueError):
    """Nothing of the grammar; the text goes on after what was given."""


def _read(given: object) -> Position:
    if isinstance(given, Mapping):
        return _offsets(given)
    if isinstance(given, datetime):
        return _aware(given)
    text = given if isinstance(given, str) else ""
    if text in (RUNNING, LATEST, EARLIEST, START):
        return text
    if text.startswith("{"):
        try:
            return _offsets(msgspec.json.decode(text))
        except msgspec.DecodeError as error:
            raise _NoPosition(f", which is no JSON: {error}") from None
    if text.startswith(_GROUP) and (name := text.removeprefix(_GROUP)):
        return Group(name)
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise _NoPosition from None
    return moment.replace(tzinfo=timezone.utc) if len(text) == len("2026-11-01") else _aware(moment)


def _aware(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise _NoPosition(", which has no time zone: append Z for UTC, or an offset as +01:00; a datetime needs tzinfo")
    return moment


def _offsets(given: object) -> Mapping[str, Mapping[int, int]]:
    try:
        offsets = msgspec.convert(given, dict[str, dict[int, int]], strict=False)
    except msgspec.ValidationError as error:
        raise _NoPosition(f", which is no offsets by topic and partition: {error}") from None
    numbers = ((partition, offset) for by_partition in offsets.values() for partition, offset in by_partition.items())
    if any(partition < 0 or offset < LATEST_OFFSET for partition, offset in numbers):
        raise _NoPosition(", and partitions and offsets are 0 or more")
    return offsets


UNTIL = Positions(
    "until", (RUNNING, LATEST), instead="To end at another place: `exactlyonce backfill` or `catch-up`, with --to."
)
TO = Positions("to", (LATEST, TIME, GROUP, OFFSETS))
BEGINNING = Positions("offsets", (EARLIEST, LATEST, START, TIME, GROUP, OFFSETS))
"""See `write_state`."""
