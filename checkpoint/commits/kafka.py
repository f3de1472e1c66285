"""The commit protocol of Kafka's transactions: they are counted, checked, ended, proven or repaired.

Invariants: a committable has the broker's own count, and is whole; a decided one that was refused ends as proven
committed, repaired, or a halt that names it; later transactions of the same sink subtask become visible after its
repair, never before. Each procedure can be stopped between any two requests and run again. A fate in a `Resolution`
never changes; a repair stands in for its committable from the moment it is durable; the lost part of a committable is a
part of the one in the manifest, whichever repair was lost last; only the user gives one up.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision import Check, CommitProtocol, Fates
from exactlyonce.checkpoint.events import PendingCheckpoint, Refuse
from exactlyonce.checkpoint.records.manifest import (
    LOSS_ACCEPTED,
    REPAIRED,
    Committable,
    Incarnation,
    Manifest,
    Precommit,
    Repair,
    TransactionalId,
    Written,
)
from exactlyonce.checkpoint.requests import (
    Fate,
    Outcome,
    Outputs,
    Procedure,
    ProducerState,
    TransactionState,
    TxnState,
)
from exactlyonce.checkpoint.transactions.commit import (
    Commits,
    await_markers,
    commit,
    end,
    ending,
    resolve_unknown,
    sweep,
)
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt, TopicError, Undetermined, require


@dataclass
class _Committable:
    original: Committable
    """As the manifest names it."""
    current: Committable
    """The committable that stands for it now: itself, or its newest repair."""
    lost: Committable
    """The part of the original that is to be written again, if it or an earlier one was lost."""
    fate: str = ""


class Resolution:
    """The committables of *manifest*, by the transactional ids in it."""

    def __init__(self, manifest: Manifest, repairs: Iterable[Repair], *, accept_loss: bool) -> None:
        self.manifest = manifest
        self._accept_loss = accept_loss
        self._all = {c.transactional_id: _Committable(c, c, c) for c in manifest.committables if c.records}
        older = sorted(repairs, key=lambda repair: repair.number)
        self._numbers = itertools.count(1 + max((repair.number for repair in older), default=0))
        self._stand_in(older)

    def _stand_in(self, repairs: Iterable[Repair]) -> None:
        for repair in repairs:
            self._all[repair.replaced].current = repair.committable

    @property
    def fates(self) -> dict[str, str]:
        return {name: committable.fate for name, committable in self._all.items() if committable.fate}

    @property
    def waiting(self) -> list[Committable]:
        """The stand-ins of the committables without a known fate."""
        return [committable.current for committable in self._all.values() if not committable.fate]

    @property
    def named(self) -> set[str]:
        """The transactional ids that durable records name, and no sweep may abort."""
        return {committable.current.transactional_id for committable in self._all.values()}

    def note(self, commits: Commits) -> None:
        """Take in the outcome of *commits*; Halt if nothing can be learnt about one.

        Later transactions of the same sink subtask are to be written again with a lost one.
        """
        by_current = {committable.current.transactional_id: committable for committable in self._all.values()}
        for name, fate in commits.fates.items():
            committable = by_current[name]
            committable.fate = REPAIRED if committable.current is not committable.original else fate
        why = "its records are no longer in the output log, so their fate is unknown"
        for gone in commits.gone:
            self._halt_unless_accepted(by_current[gone.transactional_id], gone, why)
        for part in (*commits.lost, *commits.held):
            committable = by_current[part.transactional_id]
            committable.lost = committable.original.within(part)

    def chains(self, commits: Commits) -> list[Sequence[str]]:
        """Each lost transaction with later ones of its sink subtask: these are repaired together."""
        names = {committable.current.transactional_id: name for name, committable in self._all.items()}
        held = [(committable.writer, names[committable.transactional_id]) for committable in commits.held]
        return [
            [names[lost.transactional_id], *(name for writer, name in held if writer == lost.writer)]
            for lost in commits.lost
        ]

    def lost(self, name: str) -> Committable:
        """The part of committable *name* that is to be written again."""
        return self._all[name].lost

    def next_number(self) -> int:
        """The number of the next repair: numbers only grow, over all incarnations, so that the newest repair stands."""
        return next(self._numbers)

    def replace_by(self, repairs: Iterable[Repair]) -> list[Committable]:
        """*repairs* are durable now; returns the committables that they replace, which must not be committed now."""
        superseded = [self._all[repair.replaced].current for repair in repairs]
        self._stand_in(repairs)
        return superseded

    def give_up(self, name: str, why: str) -> None:
        """Committable *name* cannot be repaired: Halt, unless the user has accepted the loss."""
        committable = self._all[name]
        self._halt_unless_accepted(committable, committable.lost, f"the broker aborted it, and {why}")

    def _halt_unless_accepted(self, committable: _Committable, lost: Committable, why: str) -> None:
        if not self._accept_loss:
            raise Halt(self.explain(lost, why))
        committable.fate = LOSS_ACCEPTED

    def explain(self, lost: Committable, why: str) -> str:
        """The text of a halt: the lost records, and the choices."""
        checkpoint, pipeline = self.manifest.checkpoint, self.manifest.pipeline
        subtask = f" subtask {lost.subtask}" if self.manifest.partitions_of(lost.sink) is None else ""
        return (
            f"Checkpoint {checkpoint} was decided, but the output of sink {lost.sink!r}{subtask} for it is not visible "
            f"to readers: {why}.\n"
            f"  Affected: {places_of(lost)} (transaction {lost.transactional_id}).\n"
            f"  Choices: (1) if the output log can be restored from a replica or a backup, do so and run it again; "
            f"(2) `exactlyonce reset {pipeline}` and recompute the output from the input into a new topic; "
            f"(3) go on without these {lost.records} records: `exactlyonce run ... --accept-loss {checkpoint}`, in "
            f"Python accept_loss={checkpoint}.\n"
            f"  Nothing else is affected: state and the other sinks are at checkpoint {checkpoint}."
        )


def places_of(committable: Committable) -> str:
    """The records of *committable* by place, as text."""
    return ", ".join(
        f"{w.topic}[{w.partition}] offsets {w.first_offset} and on, {w.count} records" for w in committable.written
    )


TIME_LEFT_MARGIN_MS = 5_000
"""A transaction with less time left than this is not decided on: the commit might come too late."""
REPAIRS_MAX = 5
"""Repairs of one transaction by one run, before it halts."""
TRIES_AGAIN = "tries it again"
ByWriter = Mapping[tuple[int, int], Sequence[ProducerState]]
"""Producers by their id and epoch: a wide pipeline has thousands in each of hundreds of partitions."""


@dataclass(kw_only=True)
class TransactionCommits(CommitProtocol):
    """The `CommitProtocol` of a pipeline's transactions on a cluster.

    To fence a writer is to end its transaction, which may be decided: so nobody is fenced before `clean`.
    """

    pipeline: str
    cluster_id: str
    transaction_version: int
    transaction_timeout_ms: int
    attempt: int = 0
    incarnation: int = 0
    fenced_below: tuple[int, int] = (0, 0)
    """(incarnation, attempt): the transactional ids of all attempts below it have been fenced; see `sweep`."""
    counted: dict[str, Committable] = field(default_factory=dict)
    """Precommits of this attempt that were counted as they arrived, by transactional id."""
    _checked: dict[str, Committable] = field(default_factory=dict)
    """Likewise, the precommits that were checked for the present plan."""
    _standing: tuple[Committable, ...] = ()
    """The committables of the last manifest with any output, as readers must see them."""

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
            # A look at records waits for the last stable offset, and a repair writes after it: both need that nothing
            # undecided is open before them. The usual crash needs no sweep, which asks every broker.
            if not swept and (commits.unknown or commits.lost):
                outputs = {(written.topic, written.partition) for one in waiting for written in one.written}
                yield from sweep(
                    self.pipeline, self.incarnation, self.attempt,
                    protected=resolution.named, fenced_below=self.fenced_below, outputs=outputs,
                )  # fmt: skip
                swept = True
            # Transactions held behind a loss are open and protected, perhaps before unknown ones: a look would wait for
            # them. Their repair ends them; the unknown ones are asked about, and looked at, in the next round.
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
        """Abort and fence open transactions of older incarnations, and of older attempts of this one."""
        yield from self._sweep(self.incarnation, self.attempt, self.fenced_below, protected)
        if not protected:
            self.fenced_below = max(self.fenced_below, (self.incarnation, self.attempt))

    def abort_all_but(self, winners: Collection[str]) -> Procedure[None]:
        """Abort open transactions of the present attempt, except the *winners*, which come to decision.

        Bounded work may run twice: the failed try of a task has a transaction that nobody names.
        """
        yield from self._sweep(self.incarnation, self.attempt + 1, self.fenced_below, winners)

    def sweep_for(self, incarnation: Incarnation, fenced_below: tuple[int, int]) -> Procedure[None]:
        """`sweep` for *incarnation*, which may go on in another process."""
        yield from self._sweep(incarnation.incarnation, self.attempt, fenced_below, ())

    def _sweep(
        self, incarnation: int, attempt: int, fenced_below: tuple[int, int], protected: Collection[str]
    ) -> Procedure[None]:
        outputs: Outputs = yield ask.KnownOutputs()
        yield from sweep(
            self.pipeline, incarnation, attempt, protected=protected, fenced_below=fenced_below,
            outputs={(output.topic, partition) for output in outputs for partition in range(output.partitions)},
        )  # fmt: skip

    # --- decisions

    def acknowledged(self, precommits: Iterable[Precommit], outputs: Outputs) -> Procedure[None]:
        with suppress(BrokerUnavailable, TopicError):
            self.counted.update((yield from self.count(precommits, outputs)))

    def count(self, precommits: Iterable[Precommit], outputs: Outputs) -> Procedure[dict[str, Committable]]:
        """Make committables, with the broker's counts, of those precommits whose records the broker has all.

        A count may be taken as soon as a precommit is there, and holds for the decision: a sink writes nothing after
        its flush, and no other transaction has this producer id and epoch. The decision checks that it is still open,
        and checks the others again, in all partitions that the broker knows of.
        """
        wanted = [precommit for precommit in precommits if precommit.records]
        places = {precommit.sink: set[tuple[str, int]]() for precommit in wanted}
        for output in outputs:
            if output.sink in places:
                places[output.sink].update((output.topic, partition) for partition in range(output.partitions))
        asked = {place for some in places.values() for place in some}
        if not asked:
            return {}
        producers = _by_writer((yield ask.DescribeProducers(tuple(sorted(asked)))))
        pairs = ((precommit, self._committable(precommit, places[precommit.sink], producers)) for precommit in wanted)
        return {committable.transactional_id: committable for one, committable in pairs if _is_whole(committable, one)}

    def is_prepared(self, plan: PendingCheckpoint) -> bool:
        return not self._uncounted(plan)

    def prepare(self, plan: PendingCheckpoint) -> Procedure[Refuse | None]:
        self._checked.clear()
        missing = self._uncounted(plan)
        if not missing:
            return None
        try:
            checked = yield from self.check_uncounted(missing, plan.ages_ms)
        except BrokerUnavailable as error:
            return Refuse(str(error))
        if isinstance(checked, Refuse):
            return checked
        self._checked.update((committable.transactional_id, committable) for committable in checked)
        return None

    def with_committables(self, manifest: Manifest, plan: PendingCheckpoint, before: Manifest | None) -> Manifest:
        committables = list(map(self._known, _written_to(plan)))
        require(None not in committables, "a plan is prepared before its manifest is made")
        return msgspec.structs.replace(manifest, committables=tuple(filter(None, committables)))

    def check(self, plan: PendingCheckpoint) -> Check:
        states = yield from self._open(_written_to(plan), plan.ages_ms)
        return states if isinstance(states, Refuse) else None

    def check_uncounted(
        self, precommits: Iterable[Precommit], ages_ms: Mapping[str, int]
    ) -> Procedure[list[Committable] | Refuse]:
        """Make committables of *precommits*, with the broker's counts, or refuse the checkpoint."""
        wanted = [precommit for precommit in precommits if precommit.records]
        states = yield from self._open(wanted, ages_ms)
        if isinstance(states, Refuse):
            return states
        if not wanted:
            return []
        touched = {precommit: states[precommit.transactional_id].partitions for precommit in wanted}
        places = {place for partitions in touched.values() for place in partitions}
        producers = _by_writer((yield ask.DescribeProducers(tuple(sorted(places)))))
        committables = []
        for precommit, partitions in touched.items():
            committable = self._committable(precommit, set(partitions), producers)
            if not _is_whole(committable, precommit):
                return Refuse(
                    f"transaction {precommit.transactional_id} holds {committable.records} records on the broker, "
                    f"but {precommit.records} were produced"
                )
            committables.append(committable)
        return committables

    def commit(self, manifest: Manifest) -> Procedure[Fates]:
        commits = yield from commit(manifest.committables)
        for committable in manifest.committables:
            self.counted.pop(committable.transactional_id, None)
        self._standing = manifest.committables or self._standing
        sorts = {"refused": commits.lost, "unknown": commits.unknown, "held": commits.held}
        return Fates(commits.fates, {one.transactional_id: why for why, some in sorts.items() for one in some})

    # --- during the run, and at its end

    def watch(self) -> Procedure[None]:
        yield from self.sweep()

    def conclude(self, checkpoint: int) -> Procedure[None]:
        # A zombie's open transaction would hold readers back, so older attempts are swept first. Records that retention
        # has taken meanwhile were visible: their markers had been seen.
        yield from self.sweep()
        for committable in self._standing:
            if committable.records and (yield ask.Look(committable)) is Fate.ABORTED:
                raise Halt(
                    f"Checkpoint {checkpoint} is finalized, but the records of {committable.transactional_id} are not "
                    f"visible to readers. Run the pipeline again: it repairs them."
                )

    # --- one by one

    def _uncounted(self, plan: PendingCheckpoint) -> list[Precommit]:
        """The precommits of *plan* that were not counted as they arrived."""
        return [precommit for precommit in _written_to(plan) if _of(precommit, self.counted) is None]

    def _known(self, precommit: Precommit) -> Committable | None:
        return _of(precommit, self.counted) or _of(precommit, self._checked)

    def _open(
        self, precommits: Sequence[Precommit], ages_ms: Mapping[str, int]
    ) -> Procedure[Mapping[str, TransactionState] | Refuse]:
        """The transactions of *precommits* by their ids; a refusal if one is not open, or not for long enough."""
        if not precommits:
            return {}
        names = tuple(precommit.transactional_id for precommit in precommits)
        states: Mapping[str, TransactionState] = yield ask.DescribeTransactions(names)
        for precommit, name in zip(precommits, names, strict=True):
            problem = _why_not(precommit, states.get(name), self.transaction_timeout_ms, ages_ms[name])
            if problem:
                return Refuse(problem)
        return states

    def _committable(self, precommit: Precommit, partitions: Set[tuple[str, int]], producers: ByWriter) -> Committable:
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
        """Write the same records in new transactions, which a durable record names before they are committed.

        *chain* begins with a lost committable; later ones of the same sink subtask come after it in the log again.
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
            commits = yield from resolve_unknown((yield from commit(repair.committable for repair in repairs)))
            resolution.note(commits)
            fates = resolution.fates
            chain = [name for name in chain if name not in fates]
            if not chain:
                return recorded
        aborted = (
            f"{REPAIRS_MAX} repairs of it were aborted by the broker one after the other; another run {TRIES_AGAIN}"
        )
        raise Halt(resolution.explain(resolution.lost(chain[0]), aborted))


def _of(precommit: Precommit, known: Mapping[str, Committable]) -> Committable | None:
    """The committable of *precommit*; ids are used again, so one of an older transaction proves nothing."""
    one = known.get(precommit.transactional_id)
    return one if one is not None and (one.producer_id, one.epoch) == (precommit.producer_id, precommit.epoch) else None


def _written_to(plan: PendingCheckpoint) -> list[Precommit]:
    return [precommit for precommit in plan.precommits if precommit.records]


def _why_not(precommit: Precommit, state: TransactionState | None, timeout_ms: int, age_ms: int) -> str | None:
    """Why *precommit* cannot be decided on, or None."""
    name = precommit.transactional_id
    if state is None or state.state != TxnState.ONGOING:
        return f"transaction {name} is {state.state if state else 'unknown to the broker'}, not Ongoing"
    if (state.producer_id, state.epoch) != (precommit.producer_id, precommit.epoch):
        return f"transaction {name} belongs to another producer now"
    left_ms = timeout_ms - age_ms
    if left_ms < min(TIME_LEFT_MARGIN_MS, timeout_ms // 4):
        return f"transaction {name} has only {left_ms} ms left before the broker ends it"
    return None


def _by_writer(producers: Iterable[ProducerState]) -> ByWriter:
    by_writer = defaultdict[tuple[int, int], list[ProducerState]](list)
    for producer in producers:
        by_writer[producer.producer_id, producer.epoch].append(producer)
    return by_writer


def _written(precommit: Precommit, partitions: Set[tuple[str, int]], producers: ByWriter) -> list[Written]:
    """The records of *precommit* as the broker counts them. Its epoch is fresh, so its sequences began at 0."""
    return [
        Written(producer.topic, producer.partition, producer.transaction_start_offset, producer.last_sequence + 1)
        for producer in producers.get((precommit.producer_id, precommit.epoch), ())
        if (producer.topic, producer.partition) in partitions
        and producer.transaction_start_offset is not None
        and producer.last_sequence >= 0
    ]


def _is_whole(committable: Committable, precommit: Precommit) -> bool:
    """Whether the broker has as many records as were produced."""
    return committable.records == precommit.records


def standing(manifest: Manifest, repairs: Iterable[Repair], fates: Mapping[str, str]) -> tuple[Committable, ...]:
    """The committables of the finalized *manifest* as readers must see them.

    The newest repair for each partition stands for a lost one; one whose loss was accepted is left out.
    """
    visible = []
    newest_first = sorted(repairs, key=lambda repair: repair.number, reverse=True)
    for original in manifest.committables:
        if fates.get(original.transactional_id) == LOSS_ACCEPTED:
            continue
        repaired: set[tuple[str, int]] = set()
        stand_ins = [repair.committable for repair in newest_first if repair.replaced == original.transactional_id]
        for one in (*stand_ins, original):
            left = tuple(written for written in one.written if (written.topic, written.partition) not in repaired)
            repaired.update((written.topic, written.partition) for written in left)
            if left:
                visible.append(msgspec.structs.replace(one, written=left))
    return tuple(visible)


def _written_again(manifest: Manifest, lost: Committable, transactional_id: str) -> Procedure[Committable | str]:
    """The records of *lost* in a new transaction, or why there is none.

    They are copied from the output log (copy repair), or else computed again from the input and the previous checkpoint
    (replay repair), if that gives as many records in every partition.
    """
    copied: Committable | str = yield ask.CopyTransaction(lost, transactional_id)
    if not isinstance(copied, str):
        return copied
    replayed: Committable | str = yield ask.ReplayTransaction(manifest, lost, transactional_id)
    if isinstance(replayed, str):
        return f"it cannot be copied: {copied}\n  Nor can it be made again by a replay: {replayed}"
    if replayed.counts != lost.counts:
        return f"it cannot be copied: {copied}\n  A replay gives other counts: {places_of(replayed)}"
    return replayed


def _record(manifest: Manifest, repairs: Iterable[Repair]) -> Procedure[None]:
    """Make *repairs* durable before any of them is committed."""
    outcome = yield ask.Append(tuple(repairs))
    if outcome is not Outcome.DONE:
        raise Undetermined(
            f"The repair of checkpoint {manifest.checkpoint} could not be recorded ({outcome.value}). "
            f"Nothing is lost: run the pipeline again, it reads what is true."
        )
