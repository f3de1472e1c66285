"""The format of a block: whole sections of key groups, so that a reader of one group decodes only what it needs.

    body    = "EOS1", length of the header (4 bytes, big-endian), header, zlib(sections, end to end)
    header  = msgpack array: operator, checkpoint, sections, and the version of the states where it is not 1
    section = msgpack array: key group, kind, entries, bytes of its keys, bytes of its states
    keys    = msgpack array: [keys with a state, deleted keys];  states = msgpack array, typed

All sections of a block belong to one checkpoint. At one checkpoint a group is either an image (its whole state, in any
number of sections) or an increment. A body stays under `BLOCK_SIZE_MAX` bytes. Sizes are checked before anything is
decompressed or decoded.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX
from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.keys import key_forms_of
from exactlyonce.state.errors import UNDECODABLE, DamagedState, StateUnstorable
from exactlyonce.state.key_groups import mask_of

IMAGE = 0
INCREMENT = 1
RAW_TARGET = 256 * 1024
GROUP_LARGE = 32 * 1024
"""A key group of this size shares a block with one like it at most, so that its reader reads little else."""
SECTION_SIZE_MAX = 900 * 1000
_MAGIC = b"EOS1"
_PREFIX = len(_MAGIC) + 4


class Section(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of one key group in a block."""

    group: int
    kind: int
    entries: int
    key_bytes: int
    state_bytes: int


class BlockHeader(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a block, readable without decompressing it."""

    operator: str
    checkpoint: int
    sections: tuple[Section, ...]
    version: int = 1
    """The version of the states; see `pipeline.versions`."""
    key_forms: int = 0
    """The forms of the keys with a state; see `pipeline.keys`. Only the index has it. 0: unknown."""

    @property
    def groups(self) -> int:
        """The key groups with a section here, as a mask."""
        return mask_of({section.group for section in self.sections})

    @property
    def images(self) -> int:
        """The key groups with an image, or a part of it, here, as a mask."""
        return mask_of({section.group for section in self.sections if section.kind == IMAGE})


class EncodedBlock(msgspec.Struct, frozen=True):
    header: BlockHeader
    body: bytes

    @property
    def group(self) -> int:
        """Its first key group: names the block and places it on a partition."""
        return self.header.sections[0].group


_encode = msgspec.msgpack.Encoder().encode
_header_decoder = msgspec.msgpack.Decoder(BlockHeader)
_keys_decoder = msgspec.msgpack.Decoder(tuple[list[bytes], list[bytes]])


class BlockEncoder:
    """Packs sections into blocks. The methods return the block that they finished, if any."""

    def __init__(self, operator: str, checkpoint: int, version: int = 1) -> None:
        self._operator = operator
        self._checkpoint = checkpoint
        self._version = version
        self._sections: list[Section] = []
        self._raw: list[bytes] = []
        self._raw_bytes = self._key_forms = 0

    def add(self, group: int, kind: int, keys: EncodedKeys, states: bytes, entries: int) -> EncodedBlock | None:
        size = len(keys.body) + len(states)
        if size > SECTION_SIZE_MAX:
            raise StateUnstorable(
                f"A state of operator {self._operator!r} takes {size} bytes with its key; at most {SECTION_SIZE_MAX}"
                f" fit a block. Spread it over more keys."
            )
        finished = self._make_room(size, RAW_TARGET)
        self._sections.append(Section(group, kind, entries, len(keys.body), len(states)))
        self._raw += keys.body, states
        self._raw_bytes += size
        self._key_forms |= keys.forms
        return finished

    def begin_group(self, raw_bytes: int) -> EncodedBlock | None:
        """Finish the block if a key group of some *raw_bytes* should not be in it, too."""
        return self._make_room(raw_bytes, RAW_TARGET if raw_bytes < GROUP_LARGE else 2 * GROUP_LARGE)

    def _make_room(self, raw_bytes: int, target: int) -> EncodedBlock | None:
        return self.flush() if self._raw_bytes + raw_bytes > target else None

    def flush(self) -> EncodedBlock | None:
        if not self._sections:
            return None
        header = BlockHeader(self._operator, self._checkpoint, tuple(self._sections), self._version, self._key_forms)
        fields = msgspec.structs.astuple(header)
        encoded = _encode(fields[: 4 if self._version > 1 else 3])  # as it has always been written
        body = b"".join((_MAGIC, len(encoded).to_bytes(4, "big"), encoded, zlib.compress(b"".join(self._raw), 1)))
        require(len(body) < BLOCK_SIZE_MAX, f"a block is under {BLOCK_SIZE_MAX} bytes, not {len(body)}")
        self._sections, self._raw, self._raw_bytes, self._key_forms = [], [], 0, 0
        return EncodedBlock(header, body)


class EncodedKeys(NamedTuple):
    """The keys' half of a section."""

    body: bytes
    forms: int
    """`BlockHeader.key_forms` of the section."""


def end_of_parts(operator: str, since: int, version: int, group: int) -> EncodedBlock:
    """An image without entries: with it, *group* needs no block before checkpoint *since* (see `chain`)."""
    encoder = BlockEncoder(operator, since, version)
    encoder.add(group, IMAGE, encode_keys([], []), _encode([]), 0)
    block = encoder.flush()
    assert block is not None
    return block


def encode_keys(keys: Sequence[bytes], deleted: Sequence[bytes], own: Sequence[bytes] | None = None) -> EncodedKeys:
    """*keys* with a state, and *deleted* ones; *own*: the user's keys in *keys*, unless these are them."""
    return EncodedKeys(_encode((keys, deleted)), key_forms_of(keys if own is None else own))


class BlockDecoder:
    """A block that was read. Its sections are decompressed when the first one is wanted, until `release`."""

    def __init__(self, body: bytes) -> None:
        start = _PREFIX + int.from_bytes(body[len(_MAGIC) : _PREFIX], "big")
        _check(body[: len(_MAGIC)] == _MAGIC, "it does not start with EOS1: it is of another version, or no block")
        _check(start <= len(body), "its header is cut off")
        try:
            self.header = _header_decoder.decode(body[_PREFIX:start])
        except UNDECODABLE as error:
            raise DamagedState(f"A block of state is damaged: its header does not decode: {error}.") from error
        self._packed = memoryview(body)[start:]
        self._raw: memoryview | None = None
        self._ends: list[int] = []
        end = 0
        for section in self.header.sections:
            sizes = (section.group, section.entries, section.key_bytes, section.state_bytes)
            _check(min(sizes) >= 0 and section.kind in (IMAGE, INCREMENT), "its header holds impossible figures")
            end += section.key_bytes + section.state_bytes
            self._ends.append(end)
        _check(0 < end <= max(RAW_TARGET, SECTION_SIZE_MAX), "its header holds impossible sizes")

    def section(self, number: int) -> tuple[list[bytes], list[bytes], memoryview]:
        """Keys, deleted keys and encoded states of a section."""
        if self._raw is None:
            self._raw = memoryview(self._decompressed())
        section, end = self.header.sections[number], self._ends[number]
        middle = end - section.state_bytes
        try:
            keys, deleted = _keys_decoder.decode(self._raw[middle - section.key_bytes : middle])
        except UNDECODABLE as error:
            raise DamagedState(f"A block of state is damaged: keys do not decode: {error}.") from error
        _check(len(keys) + len(deleted) == section.entries, "it holds another number of keys than its header says")
        return keys, deleted, self._raw[middle:end]

    @property
    def held(self) -> bool:
        """Whether it is decompressed."""
        return self._raw is not None

    @property
    def raw_bytes(self) -> int:
        """Its decompressed size."""
        return self._ends[-1]

    def release(self) -> None:
        self._raw = None

    def _decompressed(self) -> bytes:
        unpack = zlib.decompressobj()
        try:
            raw = unpack.decompress(self._packed, self._ends[-1])
            complete = len(raw) == self._ends[-1] and not unpack.decompress(unpack.unconsumed_tail, 1) and unpack.eof
        except zlib.error as error:
            raise DamagedState(f"A block of state is damaged: it does not decompress: {error}.") from error
        _check(complete, "it holds another number of bytes than its header says")
        return raw


def _check(condition: Any, otherwise: str) -> None:
    if not condition:
        raise DamagedState(f"A block of state is damaged: {otherwise}.")
