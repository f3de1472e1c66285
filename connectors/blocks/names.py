"""The names of files: each has the key of its block and the digest of its bytes.

Invariant: one process writes a name, once, since the nonce is its own, and with one content, whose digest is part of
the name. So a listing alone gives the references, and no late write of another process can change a referenced file.
"""

from __future__ import annotations

import re
import secrets

import msgspec

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import BlockRef

PARTITION, OFFSET = 1, 0
"""The place in every file's reference, which nobody uses: files have no places in the topic."""

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
    """The name of the file of *ref*; None if its key is not one of ours."""
    key = BlockKey.parse(ref.key)
    return None if key is None else file_name(key, ref.sha256)


def aside(key: BlockKey, sha256: bytes) -> str:
    """A temporary name for the file of a block. A file that stays there is an orphan like any other, by its key."""
    return file_name(msgspec.structs.replace(key, nonce=f"{key.nonce}{secrets.token_hex(4)}"), sha256)


def reference(name: str, size: int) -> BlockRef | None:
    """The reference to the file *name* of so many bytes; None: it is not one of ours."""
    match = _NAME.match(name)
    if match is None:
        return None
    incarnation, attempt, checkpoint, operator, group, part, nonce, digest = match.groups()
    key = BlockKey(int(incarnation), int(checkpoint), operator, int(group), int(part), int(attempt), nonce)
    return BlockRef(PARTITION, OFFSET, str(key), size, bytes.fromhex(digest))
