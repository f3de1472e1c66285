"""Money that moves between accounts: what one pays comes round a loop, and is credited to the other.

    exactlyonce run accounts:pipeline --bootstrap-servers 127.0.0.1:9092 --parallelism 2

Accounts are keyed state, in as many processes as there are subtasks. A transfer debits one account and is then in
flight to the other. A checkpoint has both: in each, all balances and the transfers in flight sum up to zero.
"""

from __future__ import annotations

import msgspec

from exactlyonce import KafkaSink, KafkaSource, Pipeline


class Transfer(msgspec.Struct):
    """An order to move *amount* from one account to another."""

    id: int
    payer: str
    payee: str
    amount: int


class Entry(msgspec.Struct):
    """A side of a transfer: *amount* is added to *account*; the payer's is below zero."""

    transfer: int
    account: str
    other: str
    amount: int
    booked: bool = False


def debit(transfer: Transfer) -> Entry:
    """The payer's side, which goes first."""
    return Entry(transfer.id, transfer.payer, transfer.payee, -transfer.amount)


def book(balance: int | None, entry: Entry) -> tuple[int, list[Entry]]:
    """The new balance, the entry as booked, and after a payer's side the payee's."""
    booked = msgspec.structs.replace(entry, booked=True)
    credit = [Entry(entry.transfer, entry.other, entry.account, -entry.amount)] if entry.amount < 0 else []
    return (balance or 0) + entry.amount, [booked, *credit]


def pipeline(name: str = "accounts", pause: str = "0ms") -> Pipeline:
    """Topic NAME-transfers to NAME-entries; money is in flight for *pause*."""
    pipeline = Pipeline(name)
    credits = pipeline.feedback("credits", Entry, pause=pause)
    debits = pipeline.source("transfers", KafkaSource(f"{name}-transfers", value=Transfer)).map(debit)
    entries = debits.union(credits).key_by(lambda entry: entry.account).stateful_flat_map("balances", book)
    entries.filter(lambda entry: not entry.booked).feed(credits)
    entries.filter(lambda entry: entry.booked).sink(
        "entries", KafkaSink(f"{name}-entries", key=lambda entry: entry.account)
    )
    return pipeline
