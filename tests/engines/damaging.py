"""Damage to the files of a broker: bytes changed, as by a failing disk."""

from __future__ import annotations

from pathlib import Path

from kafka.record._crc32c import crc

from exactlyonce.testing.cluster import OwnCluster

_LENGTH, _CRC, _CHECKED = 8, 17, 21
"""Offsets in a batch of its length, its checksum, and the first byte that it covers."""


def damage(kafka: OwnCluster, topic: str, partition: int, marker: bytes, *, known_checksum: bool) -> None:
    """Flip a bit behind the last *marker* in the files of a partition, of which the batch's checksum knows or not."""
    kafka.broker.stop()
    for segment in Path(kafka.broker.data_dir).rglob(f"{topic}-{partition}/*.log"):
        content = bytearray(segment.read_bytes())
        place = content.rfind(marker)
        if place >= 0:
            content[place + len(marker) + 12] ^= 1
            if known_checksum:
                _correct(content, place)
            segment.write_bytes(bytes(content))
            break
    else:
        raise AssertionError(f"no file of {topic}-{partition} holds {marker!r}")
    kafka.broker.start()


def _correct(content: bytearray, place: int) -> None:
    start = 0
    while True:
        end = start + 12 + int.from_bytes(content[start + _LENGTH : start + _LENGTH + 4], "big")
        if place < end:
            content[start + _CRC : start + _CRC + 4] = crc(bytes(content[start + _CHECKED : end])).to_bytes(4, "big")
            return
        start = end
