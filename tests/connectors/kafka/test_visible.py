"""The writers of offsets, by the headers of batches."""

from __future__ import annotations

from exactlyonce.connectors.kafka.visible import Scan

ANN, BOB = (1, 0), (2, 5)


def test_offsets_fall_into_runs_of_one_writer() -> None:
    """Offsets of markers and of aborted records are missing; two batches of one writer are one run."""
    scanned = Scan(10)
    for base, last, writer in ((10, 14, ANN), (15, 16, ANN), (18, 20, BOB), (21, 21, ANN)):
        scanned.add(base, last, last - base + 1, writer)
    runs = list(scanned.runs([10, 12, 16, 18, 19, 21]))
    assert runs == [(ANN, 0, 3), (BOB, 3, 5), (ANN, 5, 6)]
    assert list(scanned.runs([19])) == [(BOB, 0, 1)]
    assert list(scanned.runs([])) == []
    assert scanned.counts == {ANN: 8, BOB: 3}
    assert scanned.extents == {ANN: range(10, 22), BOB: range(18, 21)}
    assert scanned.end == 22
