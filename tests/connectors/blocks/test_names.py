"""The names of files that are blocks."""

from __future__ import annotations

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.connectors.blocks.names import aside, file_name, name_of, reference
from exactlyonce.pipeline.names import NAME_LENGTH_MAX


def test_names_of_files() -> None:
    key = BlockKey(10**17, 10**17, "o" * NAME_LENGTH_MAX, 32_767, 10**6, 10**6, "0123456789ab")
    name = file_name(key, bytes(32))
    assert len(aside(key, bytes(32))) <= 255
    assert reference(name, 7) == BlockRef(1, 0, str(key), 7, bytes(32))
    assert name_of(BlockRef(1, 0, str(key), 7, bytes(32))) == name
    assert name_of(BlockRef(1, 0, "manifest/7", 7, bytes(32))) is None
    other = reference(aside(key, bytes(32)), 7)
    assert other is not None
    assert other.key != str(key)
    for foreign in ("probe", "README", f"{name}.crc", f".{name}", name[:-1], name.upper()):
        assert reference(foreign, 7) is None
