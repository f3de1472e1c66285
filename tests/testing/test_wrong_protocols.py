"""The model bites: protocols that are nearly right lose or double records on it, and the right one does not.

A copy of ten records, three to a checkpoint, in a transaction for each; every life can end after every step, and the
network can lose any EndTxn or its answer. Each wrong protocol is the right one but for one rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, product
from typing import NamedTuple

import pytest

from exactlyonce.testing import (
    BrokerModel,
    Error,
    Fault,
    NoAnswer,
    SimulatedClock,
    TransactionalBroker,
    UnreliableBroker,
)

RECORDS = list(range(10))
INTERVAL = 3
LIVES_MAX = 20


class Manifest(NamedTuple):
    """Checkpoint *number*: everything before *end* is in the transaction of (id, producer id, epoch) or older."""

    number: int
    end: int
    transaction: tuple[str, int, int]


class Finalized(NamedTuple):
    number: int


class Halted(Exception):
    """A decided transaction turned out not to be committed."""


class RestartNeeded(Exception):
    """This life cannot go on; the next one begins from the last manifest."""


@dataclass
class Copier:
    """The right protocol. Its methods yield after every step: there, a life may end."""

    broker: TransactionalBroker
    clock: SimulatedClock
    lives: int = 0

    def life(self) -> Iterator[str]:
        """Recover, then copy what is left."""
        self.lives += 1
        manifest, finalized = self.decided()
        yield from self.before_commit(manifest)
        if manifest and not finalized:
            yield from self.commit(manifest)
        yield from self.sweep()
        number, start = (manifest.number, manifest.end) if manifest else (0, 0)
        transaction, produced = self.new_transaction(number + 1), start
        while start < len(RECORDS):
            number, end = number + 1, min(start + INTERVAL, len(RECORDS))
            yield from self.produce(transaction, RECORDS[produced:end])
            after = self.next_transaction(number + 1, transaction)
            produced = min(end + 1, len(RECORDS))
            yield from self.produce(after, RECORDS[end:produced])
            yield from self.decide(Manifest(number, end, transaction))
            start, transaction = end, after

    def before_commit(self, manifest: Manifest | None) -> Iterator[str]:
        """Nothing may be done to transactions before the decided one is committed."""
        yield "recovering"

    def new_transaction(self, number: int) -> tuple[str, int, int]:
        name = f"out-{self.lives}-{number}"
        answer = self.broker.init_transactions(name)
        assert answer.error is Error.NONE
        return name, answer.producer_id, answer.epoch

    def next_transaction(self, number: int, transaction: tuple[str, int, int]) -> tuple[str, int, int]:
        """The next interval is produced before this one is decided, under an id of its own."""
        return self.new_transaction(number)

    def produce(self, transaction: tuple[str, int, int], values: list[int]) -> Iterator[str]:
        for value in values:
            if self.broker.produce(*transaction, "out", 0, [(None, value)]).error is not Error.NONE:
                raise RestartNeeded
            yield f"produced {value}"

    def decide(self, manifest: Manifest) -> Iterator[str]:
        """First the decision, then the commit."""
        self.write(manifest)
        yield f"decided {manifest.number}"
        yield from self.commit(manifest)

    def commit(self, manifest: Manifest) -> Iterator[str]:
        """Ask the same until it is answered; anything but committed is a halt."""
        while True:
            try:
                answer = self.broker.end_txn(*manifest.transaction, commit=True)
            except NoAnswer:
                yield from self.unanswered(manifest)
                continue
            if answer is Error.NONE:
                break
            if answer is not Error.CONCURRENT_TRANSACTIONS:
                self.refused(manifest)
                break
            self.clock.advance(5)
            yield "busy"
        yield f"committed {manifest.number}"
        self.write(Finalized(manifest.number))
        yield f"finalized {manifest.number}"

    def unanswered(self, manifest: Manifest) -> Iterator[str]:
        """An unknown outcome: ask again."""
        yield "unanswered"

    def refused(self, manifest: Manifest) -> None:
        raise Halted

    def sweep(self) -> Iterator[str]:
        """Abort, and thereby fence, whatever older lives have left."""
        for listed in self.broker.list_transactions("out-"):
            if listed.state in ("Ongoing", "Empty"):
                name = listed.transactional_id
                state = self.broker.describe_transactions([name])[name]
                assert state is not None
                self.broker.end_txn(name, state.producer_id, state.epoch, commit=False)
                yield f"swept {name}"

    def write(self, record: Manifest | Finalized) -> None:
        answer = self.broker.init_transactions(None)
        self.broker.produce(None, answer.producer_id, answer.epoch, "log", 0, [(None, record)])

    def decided(self) -> tuple[Manifest | None, bool]:
        """The last manifest, and whether it is finalized."""
        log = [record.value for record in self.broker.fetch("log", 0).records]
        manifests = [each for each in log if isinstance(each, Manifest)]
        return (manifests[-1], Finalized(manifests[-1].number) in log) if manifests else (None, True)


class CommitsBeforeTheManifest(Copier):
    def decide(self, manifest: Manifest) -> Iterator[str]:
        self.broker.end_txn(*manifest.transaction, commit=True)
        yield f"committed {manifest.number} early"
        yield from super().decide(manifest)


class UsesOneProducerForAll(Copier):
    def next_transaction(self, number: int, transaction: tuple[str, int, int]) -> tuple[str, int, int]:
        return transaction


class AbortsWhatIsUnknown(Copier):
    def unanswered(self, manifest: Manifest) -> Iterator[str]:
        """Give the checkpoint up, and begin again from the one before it."""
        name, producer_id, epoch = manifest.transaction
        self.broker.end_txn(name, producer_id, epoch, commit=False)
        before = Manifest(manifest.number, manifest.end - INTERVAL, manifest.transaction)
        self.write(before)
        self.write(Finalized(before.number))
        yield "gave up"
        raise RestartNeeded


class InitializesBeforeItCommits(Copier):
    def before_commit(self, manifest: Manifest | None) -> Iterator[str]:
        if manifest:
            while self.broker.init_transactions(manifest.transaction[0]).error is not Error.NONE:
                self.clock.advance(5)
                yield "initializing"


class GoesOnAfterARefusal(InitializesBeforeItCommits):
    def refused(self, manifest: Manifest) -> None:
        """Log it, and go on."""


class SweepsNothing(Copier):
    def sweep(self) -> Iterator[str]:
        yield "nothing swept"


def outcome(protocol: type[Copier], crash_after: int, fault: Fault | None, nth: int) -> tuple[str, int]:
    """How a run ends in which a life crashes after so many steps, and how many steps it took."""
    clock = SimulatedClock()
    broker = UnreliableBroker(BrokerModel(clock), clock)
    broker.create_topic("out")
    broker.create_topic("log")
    if fault:
        broker.inject("end_txn", fault, nth)
    copier, steps = protocol(broker, clock), 0
    for _ in range(LIVES_MAX):
        try:
            for _ in copier.life():
                steps += 1
                if steps == crash_after:
                    raise RestartNeeded
            break
        except (RestartNeeded, NoAnswer):
            clock.advance(10)
        except Halted:
            return "halted", steps
    assert not broker.pending, "the ordered fault has happened"
    clock.advance(1_000)
    fetched = broker.fetch("out", 0)
    seen = [record.value for record in fetched.records]
    if fetched.last_stable_offset != fetched.high_watermark:
        return "hanging", steps
    if seen == RECORDS:
        return "right", steps
    return ("doubled" if len(set(seen)) < len(seen) else "lost"), steps


def outcomes(protocol: type[Copier]) -> set[str]:
    """How all runs end: a crash after each step, together with each fault of the network."""
    found = set()
    for fault, nth in ((None, 0), *product((Fault.ANSWER_LOST, Fault.REQUEST_LOST), (1, 3))):
        for crash_after in count(1):
            result, steps = outcome(protocol, crash_after, fault, nth)
            found.add(result)
            if steps < crash_after:
                break
    return found


def test_the_right_protocol_is_right_whenever_it_crashes() -> None:
    assert outcomes(Copier) == {"right"}


@pytest.mark.parametrize(
    ("protocol", "wrong"),
    [
        (CommitsBeforeTheManifest, "doubled"),
        (UsesOneProducerForAll, "doubled"),
        (AbortsWhatIsUnknown, "doubled"),
        (InitializesBeforeItCommits, "halted"),
        (GoesOnAfterARefusal, "lost"),
        (SweepsNothing, "hanging"),
    ],
)
def test_a_protocol_with_one_rule_broken_is_caught(protocol: type[Copier], wrong: str) -> None:
    assert wrong in outcomes(protocol)
