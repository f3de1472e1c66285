"""The name of a prepared transaction: whose it is, and which attempt made it.

Invariants: no two transactions have the same name, also where the same work is done twice; a name is parsed whole, and
what is not one is none of ours and is not touched; nobody but its sink has its owner.
"""

from __future__ import annotations

import re
from hashlib import sha256

import msgspec

_PATTERN = re.compile(r"eo:([A-Za-z0-9_.-]*~[0-9a-f]{16}):(\d+):(\d+):(\d+)\.(\d+):([0-9a-f]+)\Z", re.ASCII)


class TransactionName(msgspec.Struct, frozen=True):
    """`eo:<owner>:<subtask>:<number>:<incarnation>.<attempt>:<nonce>`.

    MySQL wants the name before the first row, when no barrier has a number yet; so it has a number of its own, and the
    checkpoint is in the row that the transaction inserts.
    """

    owner: str
    subtask: int
    number: int
    """Of the subtask's transactions in this attempt."""
    incarnation: int
    attempt: int
    nonce: str
    """Of the writer: bounded work may run twice in one attempt."""

    @property
    def transaction(self) -> str:
        """The first part of the name."""
        return f"eo:{self.owner}:{self.subtask}:{self.number}"

    @property
    def branch(self) -> str:
        """The second part of the name."""
        return f"{self.incarnation}.{self.attempt}:{self.nonce}"

    def __str__(self) -> str:
        return f"{self.transaction}:{self.branch}"

    @property
    def written_in(self) -> tuple[int, int]:
        """Incarnation and attempt: a later one is greater."""
        return self.incarnation, self.attempt

    @classmethod
    def parse(cls, text: str) -> TransactionName | None:
        """The name that *text* spells whole, or None.

        >>> TransactionName.parse("eo:totals.out~00112233aabbccdd:0:7:3.1:a0").written_in
        (3, 1)
        >>> TransactionName.parse("gtrid-of-somebody-else") is None
        True
        """
        match = _PATTERN.match(text)
        if match is None:
            return None
        owner, subtask, number, incarnation, attempt, nonce = match.groups()
        return cls(owner, int(subtask), int(number), int(incarnation), int(attempt), nonce)


def owner_of(pipeline: str, sink: str, place: str, length_max: int) -> str:
    """The owner of all transactions of *sink* at *place*: readable as far as there is room, and the same for no other.

    *place*: where in the server the ledger is, for the names of transactions are the server's.

    >>> owner_of("totals", "out", "public", 40)
    'totals.out~8ec45f955e54aa85'
    """
    digest = sha256("\0".join((pipeline, sink, place)).encode()).hexdigest()[:16]
    readable = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{pipeline}.{sink}")
    return f"{readable[: length_max - 17]}~{digest}"
