"""The comparison of a lane of a sink's outputs as two versions of a pipeline give them: key by key.

Invariants: outputs of a key are compared in order, those without a key as a multiset. Memory is bounded by the keys of
a lane and the outputs of the shown ones; without keys, by a digest for each output of the lane, where these differ.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import zip_longest

import msgspec

from exactlyonce.engines.bounded.unit.staging import OutputFile, StagedFiles, StagedRange, read_lane
from exactlyonce.pipeline.dead_letters import compared

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
    """The first difference in the outputs of a key; without a key, an output that each version has more often."""

    key: bytes | None
    place: int
    """The number of equal outputs of the key before it; 0 for outputs without a key."""
    old: ComparedOutput | None
    """None: the old version has no more outputs of the key."""
    new: ComparedOutput | None


class Comparison(msgspec.Struct, frozen=True, tag="comparison"):
    """A lane of the outputs of a sink in both versions."""

    lane: int
    old: StagedRange
    """A message with the `OutputFile` of each subtask, in order."""
    new: StagedRange
    shown: int
    """The most differences to return."""


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    keys: int
    """The number of keys with outputs in either version."""
    differing: int
    """The number of keys whose outputs differ."""
    differences: tuple[KeyDifference, ...]
    """The differences of the first such keys."""
    keyless: bool
    """Whether there are outputs without a key."""
    keyless_difference: KeyDifference | None
    """None: they do not differ."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Comparison)
_outputs_decoder = msgspec.msgpack.Decoder(list[OutputFile])


def compare_lane(comparison: bytes, attempt_label: str) -> bytes:
    """Compare the lane of an encoded `Comparison`; return the encoded `Compared`."""
    work = _decoder.decode(comparison)
    with closing(StagedFiles()) as files:
        sides = [_outputs_decoder.decode(files.message(side)) for side in (work.old, work.new)]
    (old, old_keyless), (new, new_keyless) = (_digests(side, work.lane) for side in sides)
    differing = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    shown = set(differing[: work.shown])
    found = [_of_keys(side, work.lane, shown) for side in sides] if shown else []
    differences = [difference(key, *(by_key.get(key, ()) for by_key in found)) for key in differing[: work.shown]]
    same = old_keyless == new_keyless
    return _encode(
        Compared(
            keys=len({*old, *new}),
            differing=len(differing),
            differences=tuple(differences),
            keyless=bool(old_keyless or new_keyless),
            keyless_difference=None if same else _keyless_difference(sides, work.lane),
        )
    )


def _digest(before: bytes, output: ComparedOutput) -> bytes:
    return hashlib.blake2b(before + _encode(output.content), digest_size=DIGEST_BYTES).digest()


def _digests(side: Sequence[OutputFile], lane: int) -> tuple[dict[bytes, bytes], int]:
    """By key, a digest of its outputs in order; and the sum of the digests of outputs without a key."""
    digests = defaultdict[bytes, bytes](bytes)
    keyless = 0
    for key, output in _outputs(side, lane):
        if key is None:
            keyless += int.from_bytes(_digest(b"", output), "big")
        else:
            digests[key] = _digest(digests[key], output)
    return digests, keyless


def _of_keys(side: Sequence[OutputFile], lane: int, keys: set[bytes]) -> dict[bytes, list[ComparedOutput]]:
    found = defaultdict[bytes, list[ComparedOutput]](list)
    for key, output in _outputs(side, lane):
        if key is not None and key in keys:
            found[key].append(output)
    return found


def _keyless_difference(sides: Sequence[Sequence[OutputFile]], lane: int) -> KeyDifference:
    surplus = Counter[bytes]()
    for side, one in zip(sides, (1, -1), strict=True):
        for key, output in _outputs(side, lane):
            if key is None:
                surplus[_digest(b"", output)] += one

    def more(side: Sequence[OutputFile], one: int) -> ComparedOutput | None:
        keyless = (output for key, output in _outputs(side, lane) if key is None)
        return next((output for output in keyless if surplus[_digest(b"", output)] * one > 0), None)

    return KeyDifference(None, 0, more(sides[0], 1), more(sides[1], -1))


def _outputs(side: Sequence[OutputFile], lane: int) -> Iterator[tuple[bytes | None, ComparedOutput]]:
    for batch in read_lane(side, lane):
        none = [None] * len(batch.values)
        columns = (batch.keys or none, batch.values, batch.headers or none, batch.timestamps or none,
                   batch.origins or none)  # fmt: skip
        for key, value, headers, timestamp_ms, origin in zip(*columns, strict=True):
            yield key, ComparedOutput(value, compared(headers or ()), timestamp_ms, origin)


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
