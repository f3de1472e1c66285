"""The comparison of a lane of a sink's outputs as two versions of a pipeline give them: key by key.

Invariants: outputs of a key are compared in order, those without a key as a multiset; memory is bounded by the keys of
a lane and the shown differences, not by the outputs.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import zip_longest

import msgspec

from exactlyonce.engines.bounded.unit.staging import OutputFile, StagedFile, StagedFiles, read_lane

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
    """The first difference in the outputs of a key."""

    key: bytes | None
    place: int
    """The number of equal outputs of the key before it; 0 for outputs without a key."""
    old: ComparedOutput | None
    """None: the old version has no more outputs of the key."""
    new: ComparedOutput | None


class Comparison(msgspec.Struct, frozen=True, tag="comparison"):
    """A lane of the outputs of a sink in both versions."""

    lane: int
    old: StagedFile
    """A message with the `OutputFile` of each subtask, in order."""
    new: StagedFile
    shown: int
    """The most differences to return."""


class Compared(msgspec.Struct, frozen=True):
    keys: int
    """The keys with outputs in either version; outputs without a key count as one."""
    differing: int
    """The keys whose outputs differ."""
    differences: tuple[KeyDifference, ...]
    """Those of the first such keys."""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Comparison)
_outputs_decoder = msgspec.msgpack.Decoder(list[OutputFile])


def compare_lane(comparison: bytes, attempt_label: str) -> bytes:
    """Compare the lane of an encoded `Comparison`; return the encoded `Compared`."""
    work = _decoder.decode(comparison)
    with closing(StagedFiles()) as files:
        sides = [_outputs_decoder.decode(files.message(side, 0)) for side in (work.old, work.new)]
    old, new = (_digests(side, work.lane) for side in sides)
    differing = sorted((key for key in {*old, *new} if old.get(key) != new.get(key)), key=lambda key: key or b"")
    shown = set(differing[: work.shown])
    found = [_of_keys(side, work.lane, shown) for side in sides] if shown else []
    differences = tuple(difference(key, *(by_key.get(key, ()) for by_key in found)) for key in differing[: work.shown])
    return _encode(Compared(len({*old, *new}), len(differing), differences))


def _digests(side: Sequence[OutputFile], lane: int) -> dict[bytes | None, bytes | int]:
    """By key, a digest of its outputs in order; without a key, the sum of the digests of all."""
    digests: dict[bytes | None, bytes] = defaultdict(bytes)
    keyless = 0
    for key, output in _outputs(side, lane):
        content = _encode(output.content)
        if key is None:
            keyless += int.from_bytes(hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest(), "big")
        else:
            digests[key] = hashlib.blake2b(digests[key] + content, digest_size=DIGEST_BYTES).digest()
    return {**digests, **({None: keyless} if keyless else {})}


def _of_keys(
    side: Sequence[OutputFile], lane: int, keys: set[bytes | None]
) -> dict[bytes | None, list[ComparedOutput]]:
    found = defaultdict[bytes | None, list[ComparedOutput]](list)
    for key, output in _outputs(side, lane):
        if key in keys:
            found[key].append(output)
    return found


def _outputs(side: Sequence[OutputFile], lane: int) -> Iterator[tuple[bytes | None, ComparedOutput]]:
    for batch in read_lane(side, lane):
        none = [None] * len(batch.values)
        columns = (batch.keys or none, batch.values, batch.headers or none, batch.timestamps or none,
                   batch.origins or none)  # fmt: skip
        for key, value, headers, timestamp_ms, origin in zip(*columns, strict=True):
            yield key, ComparedOutput(value, tuple(headers or ()), timestamp_ms, origin)


def difference(key: bytes | None, old: Sequence[ComparedOutput], new: Sequence[ComparedOutput]) -> KeyDifference:
    """The first difference between the outputs of *key*, which differ.

    >>> one, two = ComparedOutput(b"1"), ComparedOutput(b"2")
    >>> difference(b"k", [one, one], [one, two]).place
    1
    """
    if key is None:
        return KeyDifference(None, 0, _surplus(old, new), _surplus(new, old))
    pairs = enumerate(zip_longest(old, new))
    place, (was, now) = next(
        (place, (was, now)) for place, (was, now) in pairs if was is None or now is None or was.content != now.content
    )
    return KeyDifference(key, place, was, now)


def _surplus(these: Sequence[ComparedOutput], others: Sequence[ComparedOutput]) -> ComparedOutput | None:
    """The first of *these* that there are more of than among *others*."""
    left = Counter(output.content for output in others)
    for output in these:
        if not left[output.content]:
            return output
        left[output.content] -= 1
    return None
