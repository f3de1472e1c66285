"""Digests of records: the same for the same sequence, whatever its batches, and others for any other one."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as draw

from exactlyonce.engines.bounded.unit.visible_lanes import NOTHING, Digest, RecordDigest

Record = tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int]
records = draw.lists(
    draw.tuples(
        draw.sampled_from([None, b"", b"k", b"\xc0"]),
        draw.sampled_from([None, b"", b"v", b"vk"]),
        draw.sampled_from([(), (("h", None),), (("h", b""), ("h", b"1"))]),
        draw.integers(0, 2),
    ),
    max_size=40,
)


def digest(sequence: Sequence[Record], *, size: int, timed: bool = True) -> Digest:
    """The digest of *sequence* in batches of *size*; columns of nothing are left out."""
    adding = RecordDigest()
    for start in range(0, len(sequence), size):
        keys, values, headers, times_ms = zip(*sequence[start : start + size], strict=True)
        adding.add(
            list(values),
            list(keys) if any(key is not None for key in keys) else None,
            list(headers) if any(headers) else None,
            list(times_ms) if timed else None,
        )
    return adding.digest()


@given(records, records, draw.integers(1, 40), draw.integers(1, 40))
def test_equal_sequences_alone_have_equal_digests(
    some: list[Record], others: list[Record], size: int, other_size: int
) -> None:
    assert digest(some, size=size) == digest(some, size=other_size)
    assert (digest(some, size=size) == digest(others, size=other_size)) == (some == others)
    untimed = [[record[:3] for record in sequence] for sequence in (some, others)]
    contents = [digest(sequence, size=size, timed=False).contents for sequence in (some, others)]
    assert (contents[0] == contents[1]) == (untimed[0] == untimed[1])
    assert contents[0] == digest(some, size=size).contents


def test_large_batches() -> None:
    """The head of an array has one, three or five bytes."""
    many: list[Record] = [(b"%d" % number, b"v", (), number) for number in range(70_000)]
    assert digest(many, size=70_000) == digest(many, size=15) == digest(many, size=16) == digest(many, size=65_536)
    assert digest([], size=1) == NOTHING
