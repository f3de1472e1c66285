"""The names of files: each tells who wrote the block and for what, and the digest of its bytes.

Invariant: a name is written by one process once, for its nonce is that process's own, and with one content, for the
content's digest is part of it. So a listing alone says what there is, as references, and nobody else's late write can
change what a reference names.
"""

from __future__ import annotations

import re
import secrets

import msgspec

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import BlockRef

PARTITION, OFFSET = 1, 0
"""Of every file's reference. Files have no places, and the beginning of the first block partition of the topic stands
for them; nobody looks for a file's block there."""

_NUMBER = r"(0|[1-9][0-9]{0,17})"
_NAME = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.([A-Za-z0-9_-]+)\.{_NUMBER}\.{_NUMBER}\.([a-z0-9]+)\.([0-9a-f]{{64}})\Z"
)


def file_name(key: BlockKey, sha256: bytes) -> str:
    """`<incarnation>.<attempt>.<checkpoint>.<operator>.<key group>.<part>.<nonce>.<SHA-256>`."""
    return (
        f"{key.incarnation}.{key.attempt}.{key.checkpoint}.{key.operator}.{key.key_group}.{key.part}.{key.nonce}"
        f".{sha256.hex()}"
    )


def name_of(ref: BlockRef) -> str | None:
    """The name of the file that *ref* stands for; None: it stands for none."""
    key = BlockKey.parse(ref.key)
    return None if key is None else file_name(key, ref.sha256)


def aside(key: BlockKey, sha256: bytes) -> str:
    """A name under which the file of a block is made before it gets its own. Whatever stays there is an orphan as any
    other: it has a key, which nobody has been told of."""
    return file_name(msgspec.structs.replace(key, nonce=f"{key.nonce}{secrets.token_hex(4)}"), sha256)


def reference(name: str, size: int) -> BlockRef | None:
    """What the file *name* of so many bytes is referred to by; None: it is not one of ours."""
    found = _NAME.match(name)
    if found is None:
        return None
    incarnation, attempt, checkpoint, operator, group, part, nonce, digest = found.groups()
    key = BlockKey(int(incarnation), int(checkpoint), operator, int(group), int(part), int(attempt), nonce)
    return BlockRef(PARTITION, OFFSET, str(key), size, bytes.fromhex(digest))
