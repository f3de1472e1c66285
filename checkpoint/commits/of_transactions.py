"""The commit protocol of Kafka's transactions: what a sink has flushed is counted, checked, ended, proven or repaired.

Invariants: a committable is in the broker's own words, and whole; a decided one that was refused ends as proven
committed, repaired, or a halt that names it; what follows it from the same sink subtask becomes visible behind its
repair, never before. Pure procedures: each can be stopped between any two requests and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from exactlyonce.checkpoint.commits.protocol import (
    Acknowledgement,
    Check,
    CommitProtocol,
    Fates,
    Planned,
    Refuse,
    gravest,
    objection,
)
from exactlyonce.checkpoint.records.committable import Committable, Precommit, TransactionalId, Written
from exactlyonce.checkpoint.records.manifest import LOSS_ACCEPTED, Incarnation, Manifest, Repair
from exactlyonce.checkpoint.requests import (
    Append,
    CopyTransaction,
    DescribeProducers,
    DescribeTransactions,
    KnownOutputs,
    Look,
    Outputs,
    Procedure,
    ReplayTransaction,
    concurrently,
)
from exactlyonce.checkpoint.transactions.broker_answers import Fate, Outcome, ProducerState, TransactionState
from exactlyonce.checkpoint.transactions.commit import commit, end, resolve_unknown, sweep
from exactlyonce.checkpoint.transactions.markers import await_markers, ending
from exactlyonce.checkpoint.transactions.resolution import Resolution, places_of
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt, TopicError, Undetermined, require

TIME_LEFT_MARGIN_MS = 5_000
"""A transaction with less time left than this is not decided on: the commit might come too late."""
REPAIRS_MAX = 5
"""How often a run repairs what is lost, before it halts."""
TRIES_AGAIN = "tries it again"


@dataclass(kw_only=True)
class TransactionCommits(CommitProtocol):
    """Of a pipeline's transactions on a cluster. The end of one fences who wrote it, and would take what is decided:
    so nobody is fenced before `clean`."""

    pipeline: str
    cluster_id: str
    transaction_version: int
    transaction_timeout_ms: int
    attempt: int = 0
    incarnation: int = 0
    fenced_below: tuple[int, int] = (0, 0)
    """(incarnation, attempt): the transactional ids of all attempts below it have been fenced; see `sweep`."""
    counted: dict[str, Committable] = field(default_factory=dict)
    """By transactional id, the precommits of this attempt that were counted as they arrived."""
    _checked: dict[str, Committable] = field(default_factory=dict)
    """Likewise, those that were checked for the present plan."""
    _standing: tuple[Committable, ...] = ()
    """What readers must see of the last manifest that had any output."""

    # --- recovery

    def begin(self, incarnation: Incarnation, fenced_below: tuple[int, int], origin: str) -> None:
        self.incarnation, self.fenced_below = incarnation.incarnation, fenced_below

    def begin_attempt(self, attempt: int) -> None:
        self.attempt = attempt
        self.counted.clear()

    def hasten(self, unfinalized: Manifest, repairs: Iterable[Repair]) -> Procedure[None]:
        yield from commit(Resolution(unfinalized, repairs, accept_loss=False).waiting)

    def finish(
        self, manifest: Manifest, repairs: Iterable[Repair], *, accept_loss: bool
    ) -> Procedure[Mapping[str, str]]:
        known = list(repairs)
        resolution = Resolution(manifest, known, accept_loss=accept_loss)
        swept = False
        while waiting := resolution.waiting:
            commits = yield from commit(waiting)
            # A look at records waits for the last stable offset, and a repair writes behind it: both need that nothing
            # undecided is open before them. Only then, for a sweep asks every broker, and the usual crash needs none.
            if not swept and (commits.unknown or commits.lost):
                outputs = {(written.topic, written.partition) for each in waiting for written in each.written}
                yield from sweep(
                    self.pipeline, self.incarnation, self.attempt,
                    protected=resolution.named, fenced_below=self.fenced_below, outputs=outputs,
                )  # fmt: skip
                swept = True
            # What is held behind a loss is open and protected, perhaps in front of what is unknown: a look would wait
            # for it. Its repair ends it; what is unknown until then is asked about, and looked at, in the next round.
            if not commits.lost:
                commits = yield from resolve_unknown(commits)
            resolution.note(commits)
            for chain in resolution.chains(commits):
                known += yield from self._repair(resolution, chain)
        self._standing = standing(manifest, known, resolution.fates) or self._standing
        return resolution.fates

    def clean(self) -> Procedure[None]:
        yield from self.sweep()

    def sweep(self, protected: Collection[str] = ()) -> Procedure[None]:
        """Abort and fence what older incarnations, and older attempts of this one, may have left open."""
        yield from self._sweep(self.incarnation, self.attempt, self.fenced_below, protected)
        if not protected:
            self.fenced_below = max(self.fenced_below, (self.incarnation, self.attempt))

    def abort_all_but(self, winners: Collection[str]) -> Procedure[None]:
        """Abort what the present attempt has left open, except the transactions of *winners*, which come to decision.

        Bounded work may run twice: where a task was tried again, its first try has a transaction that nobody names.
        """
        yield from self._sweep(self.incarnation, self.attempt + 1, self.fenced_below, winners)

    def sweep_for(self, incarnation: Incarnation, fenced_below: tuple[int, int]) -> Procedure[None]:
        """`sweep` for *incarnation*, which may go on in another process, whatever this one has begun."""
        yield from self._sweep(incarnation.incarnation, self.attempt, fenced_below, ())

    def _sweep(
        self, incarnation: int, attempt: int, fenced_below: tuple[int, int], protected: Collection[str]
    ) -> Procedure[None]:
        outputs: Outputs = yield KnownOutputs()
        yield from sweep(
            self.pipeline, incarnation, attempt, protected=protected, fenced_below=fenced_below,
            outputs={(topic, partition) for _, topic, partitions in outputs for partition in range(partitions)},
        )  # fmt: skip

    # --- decisions

    def acknowledged(self, flushed: Iterable[Acknowledgement], outputs: Outputs) -> Procedure[None]:
        precommits = [each for ack in flushed for each in ack.precommits]
        with suppress(BrokerUnavailable, TopicError):
            self.counted.update((yield from self.count(precommits, outputs)))

    def count(self, precommits: Iterable[Precommit], outputs: Outputs) -> Procedure[dict[str, Committable]]:
        """Make committables, in the broker's own words, of those precommits of which it has as many records as were
        produced.

        It may be asked as soon as a precommit is there, and holds when it is decided: a sink writes nothing behind its
        flush, and no other transaction has this producer id and epoch. Whether that one is still open is asked then,
        and those that are left out here are checked again, in all partitions that the broker knows of.
        """
        wanted = [each for each in precommits if each.records]
        places = {each.sink: list[tuple[str, int]]() for each in wanted}
        for sink, topic, partitions in outputs:
            if sink in places:
                places[sink] += [(topic, partition) for partition in range(partitions)]
        asked = {place for some in places.values() for place in some}
        if not asked:
            return {}
        producers = yield DescribeProducers(tuple(sorted(asked)))
        found = ((each, self._committable(each, places[each.sink], producers)) for each in wanted)
        return {each.transactional_id: made for each, made in found if _is_whole(made, each)}

    def prepare(self, plan: Planned, checks: Callable[[], Sequence[Check]]) -> Procedure[Refuse | None]:
        self._checked.clear()
        missing = [each for each in _written_to(plan) if self._made_of(each) is None]
        if not missing:
            return None
        problem = gravest((yield from concurrently(*map(objection, checks()))))
        if isinstance(problem, Exception):
            raise problem
        try:
            checked = problem or (yield from self.check_uncounted(missing, plan.ages_ms))
        except BrokerUnavailable as error:
            return Refuse(str(error))
        if isinstance(checked, Refuse):
            return checked
        self._checked.update((each.transactional_id, each) for each in checked)
        return None

    def entered(self, manifest: Manifest, plan: Planned, before: Manifest | None) -> Manifest:
        found = [self._made_of(each) for each in _written_to(plan)]
        require(None not in found, "a plan is prepared before its manifest is made")
        return msgspec.structs.replace(manifest, committables=tuple(each for each in found if each is not None))

    def check(self, plan: Planned) -> Check:
        states = yield from self._open(_written_to(plan), plan.ages_ms)
        return states if isinstance(states, Refuse) else None

    def check_uncounted(
        self, precommits: Iterable[Precommit], ages_ms: Mapping[str, int]
    ) -> Procedure[list[Committable] | Refuse]:
        """Make committables of *precommits*, in the broker's own words, or say why the checkpoint must fail."""
        wanted = [each for each in precommits if each.records]
        states = yield from self._open(wanted, ages_ms)
        if isinstance(states, Refuse):
            return states
        if not wanted:
            return []
        touched = {each: states[each.transactional_id].partitions for each in wanted}
        places = {place for partitions in touched.values() for place in partitions}
        producers = yield DescribeProducers(tuple(sorted(places)))
        committables = []
        for each, partitions in touched.items():
            committable = self._committable(each, partitions, producers)
            if not _is_whole(committable, each):
                return Refuse(
                    f"transaction {each.transactional_id} holds {committable.records} records on the broker, "
                    f"but {each.records} were produced"
                )
            committables.append(committable)
        return committables

    def commit(self, manifest: Manifest) -> Procedure[Fates]:
        commits = yield from commit(manifest.committables)
        for each in manifest.committables:
            self.counted.pop(each.transactional_id, None)
        self._standing = manifest.committables or self._standing
        sorts = {"refused": commits.lost, "unknown": commits.unknown, "held": commits.held}
        return Fates(commits.fates, {each.transactional_id: why for why, some in sorts.items() for each in some})

    # --- while it runs, and at the end

    def watch(self) -> Procedure[None]:
        yield from self.sweep()

    def conclude(self, checkpoint: int) -> Procedure[None]:
        # A zombie's open transaction would hold readers before it, so that older attempts are swept first. Records that
        # retention has taken meanwhile hold nobody back, and were visible: their markers had been seen.
        yield from self.sweep()
        for committable in self._standing:
            if committable.records and (yield Look(committable)) is Fate.ABORTED:
                raise Halt(
                    f"Checkpoint {checkpoint} is finalized, but the records of {committable.transactional_id} are not "
                    f"visible to readers. Run the pipeline again: it repairs them."
                )

    # --- one by one

    def _made_of(self, precommit: Precommit) -> Committable | None:
        """The committable of *precommit*. Its id is used again, and an older transaction's would prove nothing."""
        name, producer = precommit.transactional_id, (precommit.producer_id, precommit.epoch)
        known = (self.counted.get(name), self._checked.get(name))
        return next((each for each in known if each is not None and (each.producer_id, each.epoch) == producer), None)

    def _open(
        self, precommits: Sequence[Precommit], ages_ms: Mapping[str, int]
    ) -> Procedure[Mapping[str, TransactionState] | Refuse]:
        """The transactions of *precommits* by their ids; the refusal if one cannot be decided on, whatever was
        counted."""
        if not precommits:
            return {}
        names = tuple(each.transactional_id for each in precommits)
        states: Mapping[str, TransactionState] = yield DescribeTransactions(names)
        for each in precommits:
            name = each.transactional_id
            problem = _why_not(each, states.get(name), self.transaction_timeout_ms, ages_ms[name])
            if problem:
                return Refuse(problem)
        return states

    def _committable(
        self, precommit: Precommit, partitions: Iterable[tuple[str, int]], producers: list[ProducerState]
    ) -> Committable:
        return Committable(
            transactional_id=precommit.transactional_id,
            producer_id=precommit.producer_id,
            epoch=precommit.epoch,
            transaction_version=self.transaction_version,
            cluster_id=self.cluster_id,
            sink=precommit.sink,
            subtask=precommit.subtask,
            checkpoint=precommit.checkpoint,
            written=tuple(_written(precommit, partitions, producers)),
        )

    def _repair(self, resolution: Resolution, chain: Sequence[str]) -> Procedure[list[Repair]]:
        """The same records in new transactions, which a durable record names before they are committed.

        *chain* begins with a lost committable; the others, from the same sink subtask, come behind it in the log again.
        """
        manifest, recorded = resolution.manifest, list[Repair]()
        for _ in range(REPAIRS_MAX):
            repairs = []
            for name in chain:
                lost, number = resolution.lost(name), resolution.next_number()
                slot = f"repair-{manifest.checkpoint}-{number}"
                new = TransactionalId(self.pipeline, lost.sink, lost.subtask, self.incarnation, str(self.attempt), slot)
                again = yield from _written_again(manifest, lost, str(new))
                if isinstance(again, str):
                    resolution.give_up(name, again)
                else:
                    repairs.append(Repair(manifest.checkpoint, number, self.incarnation, name, again))
            if repairs:
                yield from _record(manifest, repairs)
            recorded += repairs
            superseded = resolution.replace_by(repairs)
            yield from end(map(ending, superseded), commit=False)
            yield from await_markers(superseded, commit=False)
            commits = yield from resolve_unknown((yield from commit(each.committable for each in repairs)))
            resolution.note(commits)
            fates = resolution.fates
            chain = [name for name in chain if name not in fates]
            if not chain:
                return recorded
        aborted = (
            f"{REPAIRS_MAX} repairs of it were aborted by the broker one after the other; another run {TRIES_AGAIN}"
        )
        raise Halt(resolution.explain(resolution.lost(chain[0]), aborted))


def _written_to(plan: Planned) -> list[Precommit]:
    """The precommits that hold anything."""
    return [each for each in plan.precommits if each.records]


def _why_not(precommit: Precommit, state: TransactionState | None, timeout_ms: int, age_ms: int) -> str | None:
    """Why *precommit* cannot be decided on, or None."""
    name = precommit.transactional_id
    if state is None or state.state != "Ongoing":
        return f"transaction {name} is {state.state if state else 'unknown to the broker'}, not Ongoing"
    if (state.producer_id, state.epoch) != (precommit.producer_id, precommit.epoch):
        return f"transaction {name} belongs to another producer now"
    left_ms = timeout_ms - age_ms
    if left_ms < min(TIME_LEFT_MARGIN_MS, timeout_ms // 4):
        return f"transaction {name} has only {left_ms} ms left before the broker ends it"
    return None


def _written(
    precommit: Precommit, partitions: Iterable[tuple[str, int]], producers: list[ProducerState]
) -> list[Written]:
    """The records of *precommit* as the broker counts them. Its epoch is fresh, so that its sequences began at 0."""
    wanted = set(partitions)
    return [
        Written(each.topic, each.partition, each.transaction_start_offset, each.last_sequence + 1)
        for each in producers
        if (each.producer_id, each.epoch) == (precommit.producer_id, precommit.epoch)
        and (each.topic, each.partition) in wanted
        and each.transaction_start_offset is not None
        and each.last_sequence >= 0
    ]


def _is_whole(committable: Committable, precommit: Precommit) -> bool:
    """Whether the broker has as many records as were produced."""
    return committable.records == precommit.records


def standing(manifest: Manifest, repairs: Iterable[Repair], fates: Mapping[str, str]) -> tuple[Committable, ...]:
    """What of the finalized *manifest* readers must see: its committables, where they were lost their repairs, the
    newest for each partition, and nothing of those whose loss was accepted."""
    found = []
    newest_first = sorted(repairs, key=lambda repair: repair.number, reverse=True)
    for original in manifest.committables:
        if fates.get(original.transactional_id) == LOSS_ACCEPTED:
            continue
        repaired: set[tuple[str, int]] = set()
        stand_ins = [each.committable for each in newest_first if each.replaced == original.transactional_id]
        for each in (*stand_ins, original):
            left = tuple(written for written in each.written if (written.topic, written.partition) not in repaired)
            repaired.update((written.topic, written.partition) for written in left)
            if left:
                found.append(msgspec.structs.replace(each, written=left))
    return tuple(found)


def _written_again(manifest: Manifest, lost: Committable, transactional_id: str) -> Procedure[Committable | str]:
    """What *lost* held in a new transaction: copied from the output log (copy repair), or else computed again from the
    input and the checkpoint before (replay repair), if that gives as many records in every partition; or why not."""
    copied: Committable | str = yield CopyTransaction(lost, transactional_id)
    if not isinstance(copied, str):
        return copied
    replayed: Committable | str = yield ReplayTransaction(manifest, lost, transactional_id)
    if isinstance(replayed, str):
        return f"it cannot be copied: {copied}\n  Nor can it be made again by a replay: {replayed}"
    if replayed.counts != lost.counts:
        return f"it cannot be copied: {copied}\n  A replay gives other counts: {places_of(replayed)}"
    return replayed


def _record(manifest: Manifest, repairs: Iterable[Repair]) -> Procedure[None]:
    """Make durable what stands in for what, before any of it is committed."""
    outcome = yield Append(tuple(repairs))
    if outcome is not Outcome.DONE:
        raise Undetermined(
            f"The repair of checkpoint {manifest.checkpoint} could not be recorded ({outcome.value}). "
            f"Nothing is lost: run the pipeline again, it reads what is true."
        )
