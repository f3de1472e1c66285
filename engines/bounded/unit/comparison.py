"""The comparison of a lane of a sink's outputs as two versions of a pipeline give them: key by key.

Invariants: outputs of a key are compared in order. Messages without a key are compared as a multiset; rows that a store
appends, in order for each input record, or time of an operator, that they stem from. Memory is bounded by the keys of a
lane and the outputs of the shown ones; without keys, by a digest for each output of the lane, where these differ.

A row is staged in msgpack, with fields and the keys of dicts sorted: so equal rows have equal bytes, whatever the order
of their fields, and NaN, None and numbers of other classes differ. It is shown as JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from itertools import zip_longest
from typing import Any

import msgspec

from exactlyonce.engines.bounded.unit.staging import (
    OutputFile,
    StagedFiles,
    StagedRange,
    origin_bytes,
    ranges_in,
    read_places,
    stage_messages,
)
from exactlyonce.pipeline.dead_letters import compared
from exactlyonce.pipeline.sink import StoredRows
from exactlyonce.sinks.kafka.sink import Outputs

DIGEST_BYTES = 16


class ComparedOutput(msgspec.Struct, frozen=True):
    """An output as it is compared, and its input record."""

    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int | None = None
    """None: the sink gives none, so that it has the time of its writing."""
    origin: tuple[str, int, int] | None = None
    """(topic, partition, offset) of the input record; not compared."""

    @property
    def content(self) -> tuple[object, ...]:
        return self.value, self.headers, self.timestamp_ms


class KeyDifference(msgspec.Struct, frozen=True):
    """The first difference in the outputs of a key, or of an input record's rows without one; of messages without a
    key, an output that each version has more often."""

    key: bytes | None
    place: int
    """The number of equal outputs before it; 0 for messages without a key."""
    old: ComparedOutput | None
    """None: the old version has no more outputs of it."""
    new: ComparedOutput | None

    @property
    def origin(self) -> tuple[str, int, int] | None:
        """The input record of the old output, or of the new one."""
        outputs = [output for output in (self.old, self.new) if output is not None]
        return outputs[0].origin if outputs else None


class Comparison(msgspec.Struct, frozen=True, tag="comparison"):
    """A lane of the outputs of a sink in both versions."""

    files: tuple[StagedRange, StagedRange]
    """Messages with the locations of the old version's files, in the order of its outputs, and of the new one's."""
    slots: StagedRange
    """A message with the slots of the lane in both, as of `ranges_in`."""
    shown: int
    """The most differences to return."""
    rows: bool
    """Whether outputs are rows of a store, as `ComparableRows` has encoded them."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    keys: int
    """The number of keys with outputs in either version; for rows without a key, that of input records."""
    differing: int
    """The number of those whose outputs differ."""
    differences: tuple[KeyDifference, ...]
    """The differences of the first of these."""
    keyless: bool
    """Whether there are messages without a key."""
    keyless_difference: KeyDifference | None
    """None: they do not differ."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Comparison)
_files_decoder = msgspec.msgpack.Decoder(list[str])
_slots_decoder = msgspec.msgpack.Decoder(tuple[bytes, bytes])


def comparisons(
    location: str, sides: Sequence[Sequence[OutputFile]], lanes: int, *, shown: int, rows: bool
) -> Iterator[Comparison]:
    """The comparison of each lane of *sides*, the old version's outputs and the new one's; staged at *location*."""
    files = [[output.file.location for output in side] for side in sides]
    slots = [[b"".join([output.file.slot(lane) for output in side]) for side in sides] for lane in range(lanes)]
    old, new, *of_lanes = stage_messages(location, [*files, *slots])
    for of_lane in of_lanes:
        yield Comparison((old, new), of_lane, shown, rows)


def compare_lane(comparison: bytes, attempt_label: str) -> bytes:
    """Compare the lane of an encoded `Comparison`; return the encoded `Compared`."""
    work = _decoder.decode(comparison)
    with closing(StagedFiles()) as files:
        locations = [_files_decoder.decode(files.message(side)) for side in work.files]
        slots = _slots_decoder.decode(files.message(work.slots))
    lanes = [_Lane([*filter(None, ranges_in(*side))], rows=work.rows) for side in zip(locations, slots, strict=True)]
    (old, old_keyless), (new, new_keyless) = (lane.digests() for lane in lanes)
    differing = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    shown = set(differing[: work.shown])
    found = [lane.of_keys(shown) for lane in lanes] if shown else []
    differences = [difference(key, *(by_key.get(key, ()) for by_key in found)) for key in differing[: work.shown]]
    if work.rows:
        differences = list(map(_readable, differences))
    same = old_keyless == new_keyless
    return _encode(
        Compared(
            keys=len({*old, *new}),
            differing=len(differing),
            differences=tuple(differences),
            keyless=bool(old_keyless or new_keyless),
            keyless_difference=None if same else _keyless_difference(lanes),
        )
    )


def _digest(before: bytes, output: ComparedOutput) -> bytes:
    return hashlib.blake2b(before + _encode(output.content), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class _Lane:
    """A lane of the outputs of one version."""

    places: Sequence[StagedRange]
    _: KW_ONLY
    rows: bool

    def digests(self) -> tuple[dict[bytes, bytes], int]:
        """By key, a digest of its outputs in order; and the sum of the digests of messages without a key."""
        digests = defaultdict[bytes, bytes](bytes)
        keyless = 0
        for key, output in self.outputs():
            if key is None:
                keyless += int.from_bytes(_digest(b"", output), "big")
            else:
                digests[key] = _digest(digests[key], output)
        return digests, keyless

    def of_keys(self, keys: set[bytes]) -> dict[bytes, list[ComparedOutput]]:
        found = defaultdict[bytes, list[ComparedOutput]](list)
        for key, output in self.outputs():
            if key is not None and key in keys:
                found[key].append(output)
        return found

    def keyless(self) -> Iterator[ComparedOutput]:
        return (output for key, output in self.outputs() if key is None)

    def outputs(self) -> Iterator[tuple[bytes | None, ComparedOutput]]:
        """Each output with its key; a row without one with `_APPENDED` and its origin."""
        for batch in read_places(self.places):
            none = [None] * len(batch.values)
            columns = (batch.keys or none, batch.values, batch.headers or none, batch.timestamps or none,
                       batch.origins or none)  # fmt: skip
            for key, value, headers, timestamp_ms, origin in zip(*columns, strict=True):
                if key is None and self.rows and origin is not None:
                    key = _APPENDED + origin_bytes(origin)
                yield key, ComparedOutput(value, compared(headers or ()), timestamp_ms, origin)


def _keyless_difference(lanes: Sequence[_Lane]) -> KeyDifference:
    surplus = Counter[bytes]()
    for lane, one in zip(lanes, (1, -1), strict=True):
        for output in lane.keyless():
            surplus[_digest(b"", output)] += one

    def more(lane: _Lane, one: int) -> ComparedOutput | None:
        return next((output for output in lane.keyless() if surplus[_digest(b"", output)] * one > 0), None)

    return KeyDifference(None, 0, more(lanes[0], 1), more(lanes[1], -1))


def difference(key: bytes, old: Sequence[ComparedOutput], new: Sequence[ComparedOutput]) -> KeyDifference:
    """The first difference between the outputs of *key*, which differ.

    >>> one, two = ComparedOutput(b"1"), ComparedOutput(b"2")
    >>> difference(b"k", [one, one], [one, two]).place
    1
    """
    pairs = enumerate(zip_longest(old, new))
    place, (was, now) = next(
        (place, (was, now)) for place, (was, now) in pairs if was is None or now is None or was.content != now.content
    )
    return KeyDifference(key, place, was, now)


# --- rows of stores -------------------------------------------------------------------------------------------------

_APPENDED = b"\xc1"
"""The beginning of the key of rows without one: a byte with which no msgpack begins."""
_encode_row = msgspec.msgpack.Encoder(order="sorted").encode
_encode_json = msgspec.json.Encoder(order="sorted").encode
_decode_row = msgspec.msgpack.Decoder().decode
_JSON = 1
"""The code of an extension of msgpack: a row with numbers too large for msgpack, as JSON."""


class ComparableRows:
    """The encoder of a sink of a store in a diff. An output's value is the row, None for a deleted one."""

    def __init__(self, stored: StoredRows[Any]) -> None:
        self._stored = stored

    def encode(self, records: Sequence[Any]) -> Outputs:
        rows = self._stored.rows(records)
        values = [None if row.content is None else encoded_row(row.content) for row in rows]
        if all(row.key is None for row in rows):
            return Outputs(values, None, None)
        return Outputs(values, [encoded_row(row.key) for row in rows], None)


def encoded_row(content: Any) -> bytes:
    """The bytes of a row, or of a key: equal ones have the same.

    >>> encoded_row({"a": 1, "b": float("nan")}) == encoded_row({"b": float("nan"), "a": 1})
    True
    >>> encoded_row({"a": 1}) == encoded_row({"a": 1.0}), encoded_row(None) == encoded_row(float("nan"))
    (False, False)
    """
    try:
        return _encode_row(content)
    except OverflowError:
        return _encode_row(msgspec.msgpack.Ext(_JSON, _encode_json(content)))


def shown_row(row: bytes) -> bytes:
    """The JSON of an `encoded_row`; text and bytes alone are as they are.

    >>> shown_row(encoded_row({"b": b"abc", "a": [1, float("nan")]})), shown_row(encoded_row("ann"))
    (b'{"a":[1,NaN],"b":"YWJj"}', b'ann')
    >>> shown_row(encoded_row({"large": 1 << 70}))
    b'{"large":1180591620717411303424}'
    """
    content = _decode_row(row)
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytes):
        return content
    if isinstance(content, msgspec.msgpack.Ext):
        return bytes(content.data)
    return _json(_plain(content)).encode()


def _shown_key(key: bytes) -> bytes | None:
    """A key for people: the value of one column alone, several as an array; None: the rows are appended."""
    if key.startswith(_APPENDED):
        return None
    values = _decode_row(key)
    return shown_row(encoded_row(values[0])) if isinstance(values, list) and len(values) == 1 else shown_row(key)


def _readable(found: KeyDifference) -> KeyDifference:
    def shown(output: ComparedOutput | None) -> ComparedOutput | None:
        if output is None or output.value is None:
            return output
        return msgspec.structs.replace(output, value=shown_row(output.value))

    assert found.key is not None, "rows have keys, or origins"
    return KeyDifference(_shown_key(found.key), found.place, shown(found.old), shown(found.new))


def _plain(value: Any) -> Any:
    """*value* as `json` takes it."""
    match value:
        case dict():
            return {key if isinstance(key, str) else _json(_plain(key)): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return list(map(_plain, value))
        case bytes():
            return base64.b64encode(value).decode()
        case datetime():
            return value.isoformat()
    return value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
