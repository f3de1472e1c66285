"""The requests of a committable: how records are staged, and how they are cut into numbered requests.

Invariants: rows, `LANES` and the bounds of a window alone decide on requests and their numbers, so a repeat has the
same; all records of a key are in one lane, in their order; a request holds records of one lane. Changing a constant
here changes numbers: requests that wait across such an upgrade would be counted twice.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.sink import mapped
from exactlyonce.sinks.http.sink import LANES

RECORD_BYTES_MAX = 1_000_000
"""A dead letter of it fits into a topic with Kafka's default limit."""
WINDOW_REQUESTS, WINDOW_BYTES = 1_000, 8 << 20
"""The requests after which progress is recorded: so many are repeated after a crash, at most."""


class Request(NamedTuple):
    number: int
    """The place of its first record in the committable, from 0 on."""
    records: Sequence[bytes]
    """Each in JSON."""

    def body(self, batch: int) -> bytes:
        """The record, or with *batch* above 1 an array."""
        return self.records[0] if batch == 1 else b"[" + b",".join(self.records) + b"]"


class Window(NamedTuple):
    """Consecutive rows of a committable, from number *start* on."""

    start: int
    rows: Sequence[bytes]

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def lanes(self, batch: int) -> list[list[Request]]:
        """The requests of each lane, in order.

        >>> [[request.number for request in lane] for lane in Window(5, [b"7 1", b"9 2", b"7 3", b"7 4"]).lanes(2)]
        [[5, 8], [6]]
        """
        lanes: dict[bytes, list[tuple[int, bytes]]] = {}
        for number, row in enumerate(self.rows, self.start):
            lane, _, record = row.partition(b" ")
            lanes.setdefault(lane, []).append((number, record))
        return [
            [
                Request(numbered[first][0], [record for _, record in numbered[first : first + batch]])
                for first in range(0, len(numbered), batch)
            ]
            for numbered in lanes.values()
        ]


def windows(chunks: Iterable[bytes], start: int, batch: int) -> Iterator[Window]:
    """The windows of the rows in *chunks*, from row *start* on, which is where one begins."""
    rows: list[bytes] = []
    first, size = start, 0
    left_out = start
    for chunk in chunks:
        for row in chunk.splitlines():
            if left_out:
                left_out -= 1
                continue
            if rows and (len(rows) >= WINDOW_REQUESTS * batch or size + len(row) > WINDOW_BYTES):
                yield Window(first, rows)
                first, rows, size = first + len(rows), [], 0
            rows.append(row)
            size += len(row)
    if rows:
        yield Window(first, rows)


class StagedRows:
    """Encodes records as rows: the number of the lane, and the record in JSON, which has no line break."""

    def __init__(self, codec: Codec[Any], key: Callable[[Any], object] | None) -> None:
        self._codec, self._key = codec, key

    def encode(self, records: Sequence[Any]) -> list[bytes]:
        """See `RowEncoder`."""
        lanes = [0] * len(records) if self._key is None else map(_lane, mapped("key", self._key, records))
        rows = [b"%d %b\n" % row for row in zip(lanes, map(self._codec.encode, records), strict=True)]
        largest = max(map(len, rows), default=0)
        if largest > RECORD_BYTES_MAX:
            raise ValueError(f"a record of {largest:,} bytes is larger than {RECORD_BYTES_MAX:,}")
        return rows


def _lane(key: object) -> int:
    return zlib.crc32(msgspec.json.encode(key, order="deterministic")) % LANES
