"""Names of prepared transactions: parsed whole, short enough for each server, and nobody else's."""

from __future__ import annotations

import pytest

from exactlyonce.sinks.mysql import prepared as mysql
from exactlyonce.sinks.postgres import prepared as postgres
from exactlyonce.sinks.prepared.store import TransactionName, owner_of

LONG = "a-pipeline-with-quite-a-long-name" * 8
LARGEST = 2**63 - 1


def name(owner: str) -> TransactionName:
    return TransactionName(owner, 2**31 - 1, LARGEST, LARGEST, 2**31 - 1, "0123abcd")


def test_names_are_parsed_as_they_are_written() -> None:
    transaction = name(owner_of("totals", "out", "public", 100))
    assert TransactionName.parse(str(transaction)) == transaction
    assert transaction.written_in == (LARGEST, 2**31 - 1)


@pytest.mark.parametrize(
    "text",
    ["", "eo:totals:0:1:1.0:ab", "eo:totals.out~0011:0:1:1.0:ab", "eo:totals.out~00112233aabbccdd:0:1:1.0:ab\n",
     "xeo:totals.out~00112233aabbccdd:0:1:1.0:ab", "eo:totals.out~00112233aabbccdd:0:1:1:ab"],
)  # fmt: skip
def test_what_is_no_name_of_ours(text: str) -> None:
    assert TransactionName.parse(text) is None


def test_the_longest_names_fit() -> None:
    """PostgreSQL takes 199 bytes, XA 64 for each of two parts."""
    assert len(str(name(owner_of(LONG, LONG, "public", postgres.OWNER_LENGTH_MAX)))) < 200
    xa = name(owner_of(LONG, LONG, "shop", mysql.OWNER_LENGTH_MAX))
    assert (len(xa.transaction) <= 64, len(xa.branch) <= 64) == (True, True)


def test_owners_are_told_apart() -> None:
    of = [("p", "s", "x"), ("p", "s", "y"), ("p", "t", "x"), ("q", "s", "x"), ("p.s", "", "x"), (LONG, "s", "x"),
          (LONG + "2", "s", "x")]  # fmt: skip
    assert len({owner_of(*each, 40) for each in of}) == len(of)
