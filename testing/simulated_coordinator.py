"""One life of the simulated coordinator: the real core and procedures, and the glue that an engine adds.

Like an engine it feeds the core from one thread and asks the broker from another, one procedure after the other. It can
be paused or killed before every single request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from exactlyonce.checkpoint import coordinator as core
from exactlyonce.checkpoint import decision, requests
from exactlyonce.checkpoint.decision import Decided
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.orphans import KnownBlocks
from exactlyonce.checkpoint.records.committable import Committable, coordinator_id
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OperatorSnapshot, OrderLog, SourceOffset
from exactlyonce.checkpoint.references import references_of
from exactlyonce.checkpoint.restart import ExponentialDelay
from exactlyonce.checkpoint.states import JobState
from exactlyonce.checkpoint.transactions.broker_answers import EndAnswer, Fate, Outcome
from exactlyonce.checkpoint.transactions.commit import sweep
from exactlyonce.checkpoint.transactions.settling import settle
from exactlyonce.connectors.kafka.transactions import ANSWERS
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, Fenced, Undetermined, require
from exactlyonce.testing.broker.interface import Error, Isolation, NoAnswer
from exactlyonce.testing.simulated_log import TOPIC, LogAnswers
from exactlyonce.testing.simulated_repair import copied, replayed
from exactlyonce.testing.simulated_worker import Attempt, Barrier, Steps, Worker, reference

if TYPE_CHECKING:
    from exactlyonce.testing.simulation import World

LOOK_PAUSE_MS = 20
SWEEP_AGAIN_MS = 2_000


class Life:
    """From its first request to its end, by itself or by a crash."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive, self.paused_until_ms = True, 0
        self.end: core.End | None = None
        self.core = core.Coordinator(world.settings, ExponentialDelay(20, 200), world.subtasks, world.sink_subtasks)
        self.log = DecisionLog("p", world.topic, world.clock, world.deadline_ms() - world.clock.monotonic_ms())
        self._log_answers = LogAnswers(world)
        self.known_blocks = KnownBlocks(world.settings)
        self._fenced_below = (0, 0)
        self.manifest: Manifest | None = None
        self.attempt = 0
        """Of the broker thread: it grows only after everything queued for the attempt before is done."""
        self.workers: list[Worker] = []
        self.step_name = "open"
        self.carries = False
        """Whether the checkpoint that is being decided carries output of aborted ones."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._jobs: deque[tuple[Callable[[], Steps], Callable[[Any], None]]] = deque()
        self._finished: set[int] = set()
        self._restored: set[int] = set()
        self._deploy: tuple[int, core.Deploy] | None = None
        self._delay_ms = 0
        self._sweep_at_ms = world.clock.monotonic_ms() + SWEEP_AGAIN_MS
        world.spawn(self, self._main())
        world.spawn(self, self._broker())

    # --- threads ------------------------------------------------------------------------------------------------

    def _main(self) -> Steps:
        self._on_broker(self._open, lambda manifest: self._feed(core.Recovered(manifest)))
        while self.end is None:
            if self._inbox:
                self._inbox.popleft()()
            now_ms = self.world.clock.monotonic_ms()
            if now_ms >= self._sweep_at_ms and self.core.state is JobState.RUNNING:
                self._sweep_at_ms = now_ms + SWEEP_AGAIN_MS
                self._on_broker(self._sweep, lambda _: None)
            if self._deploy is not None and self._deploy[0] <= now_ms:
                self._start_workers(self._deploy[1])
            self._feed(core.Tick())
            yield None if self._inbox else now_ms + 3
        if self.end.error is None:
            yield from self._sweep_at_end()
        self.world.ended(self, self.end)

    def _sweep_at_end(self) -> Steps:
        """A zombie may have opened transactions since the last sweep: they would hold readers back."""
        self.kill_workers()
        try:
            yield from self._sweep()
        except ExactlyOnceError as error:
            self.end = core.End(None, error)

    def _broker(self) -> Steps:
        while self.end is None:
            if not self._jobs:
                yield self.world.clock.monotonic_ms() + 3
                continue
            call, then = self._jobs.popleft()
            try:
                result = yield from call()
            except ExactlyOnceError as error:
                self._inbox.append(partial(self._stop_with, error))
            else:
                self._inbox.append(partial(then, result))

    def _stop_with(self, error: ExactlyOnceError) -> None:
        self.end = self.end or core.End(None, error)

    def _on_broker(self, call: Callable[[], Steps], then: Callable[[Any], None]) -> None:
        self._jobs.append((call, then))

    def _feed(self, event: core.Event) -> None:
        for effect in self.core.handle(event, self.world.clock.monotonic_ms()):
            self._perform_effect(effect)

    def stop(self) -> None:
        """A clean stop is asked for."""
        self._inbox.append(lambda: self._feed(core.Stop()))

    # --- effects ------------------------------------------------------------------------------------------------

    def _perform_effect(self, effect: core.Effect) -> None:
        match effect:
            case core.Trigger(checkpoint, base, final):
                for worker in self.workers:
                    worker.triggers.append(Barrier(checkpoint, base, final))
            case core.Decide(plan):
                pinned = self.core.pinned
                self._on_broker(
                    lambda: self._decide(plan, pinned), lambda verdict: self._concluded(plan, verdict)
                )  # fmt: skip
            case core.AnnounceFinalized(checkpoint):
                for worker in self.workers:
                    worker.finalized(checkpoint)
            case core.Restart(attempt, delay_ms, reason, unfinished):
                self.world.note(f"{self} restarts: {reason}")
                self.kill_workers()
                self._delay_ms, self._deploy = delay_ms, None
                self._on_broker(
                    lambda: self._prepare_attempt(attempt, unfinished),
                    lambda manifest: self._feed(core.Recovered(manifest)),
                )
            case core.Deploy():
                self._deploy = (self.world.clock.monotonic_ms() + self._delay_ms, effect)
            case core.End():
                self.end = self.end or effect
            case core.Note(text):
                self.world.seen["aborted checkpoint"] += 1
                self.world.note(f"{self}: {text}")

    def _concluded(self, plan: core.PendingCheckpoint, verdict: Any) -> None:
        reason = getattr(verdict, "reason", "")
        self.world.note(f"{self}: checkpoint {plan.checkpoint}: {type(verdict).__name__} {reason}")
        self._feed(core.Concluded(plan.checkpoint, verdict))

    def _start_workers(self, deploy: core.Deploy) -> None:
        self._deploy = None
        self._restored, self._finished = set(), set()
        attempt = Attempt(self.log.incarnation.incarnation, deploy.attempt, deploy.manifest, self.world.parallelism)
        self.workers = [Worker(self.world, self, attempt, i) for i in range(attempt.parallelism)]

    def kill_workers(self) -> None:
        """SIGKILL to all."""
        for worker in self.workers:
            worker.kill()
        self.workers = []

    # --- what workers say ---------------------------------------------------------------------------------------

    def hear(self, worker: Worker, what: str, *details: Any) -> None:
        """A message from *worker*; from one of another attempt it is not read."""
        self._inbox.append(lambda: self._heard(worker, what, *details) if worker in self.workers else None)

    def _heard(self, worker: Worker, what: str, *details: Any) -> None:
        match what, *details:
            case "restored", *_:
                self._restored.add(worker.index)
                if len(self._restored) == len(self.workers):
                    self._feed(core.Deployed())
            case "prepared", sink, name:
                self._on_broker(
                    lambda: self._described(name), lambda state: self._grant(worker, sink, name, state)
                )  # fmt: skip
            case "acknowledged", ack:
                self.known_blocks.ledger.written(ack.checkpoint, ack.written)
                self._feed(core.Acknowledged(ack))
            case "source finished", *_:
                if worker.index not in self._finished:
                    self._finished.add(worker.index)
                    if len(self._finished) == len(self.workers):
                        self._feed(core.SourcesFinished())
            case "failed", reason:
                self._feed(core.Failed(reason))

    def _described(self, name: str) -> Steps:
        states = yield from self.world.until_answered("describe_transactions", [name])
        return states[name]

    def _grant(self, worker: Worker, sink: str, name: str, state: Any) -> None:
        """Producer id and epoch are read between the producer's initialisation and its first record."""
        if worker not in self.workers:
            return
        if state is None or state.state != "Empty":
            self._feed(core.Failed(f"{name} is not Empty"))
            return
        worker.granted(sink, name, state.producer_id, state.epoch)
        self._feed(core.ProducerGranted(sink, worker.index))

    # --- recovery -----------------------------------------------------------------------------------------------

    def _open(self) -> Steps:
        partitions = [(TOPIC, each) for each in range(self.world.block_partitions)]
        yield from self._run(settle(coordinator_id("p"), partitions))
        history = yield from self._run(self.log.open())
        history.halt_if_damaged()
        yield from self._run(self.log.begin("host", 1))
        self._fenced_below = (self.log.incarnation.fenced_below, 0)
        self.manifest, unfinalized = history.latest, history.unfinalized
        if self.manifest is None:
            yield from self._first_manifest()
        elif unfinalized is not None:
            yield from self._finish(unfinalized, lambda _: self._claimed())
        yield from self._sweep()
        if self.log.incarnation.fenced_below < self.log.incarnation.incarnation:
            self._written((yield from self._run(self.log.heartbeat(fenced_below=self.log.incarnation.incarnation))))
        if unfinalized is None:
            manifests, blocks = yield from self._run(self._claimed())
            if manifests or blocks:
                outcome = yield from self._run(self.log.append(manifests_dropped=manifests, blocks_dropped=blocks))
                self._written(outcome)
        return self.manifest

    def _claimed(self) -> requests.Procedure[decision.Dropped]:
        return self.known_blocks.recover(self.log.history, self.log.incarnation.incarnation)

    def _written(self, outcome: Outcome) -> None:
        if outcome is Outcome.UNKNOWN:
            raise Undetermined("Whether a record was written is not known.")
        if outcome is Outcome.NOT_WRITTEN:
            raise BrokerUnavailable("A record could not be written.")

    def _first_manifest(self) -> Steps:
        offsets = tuple(SourceOffset("in", "in", "in-id", p, 0) for p in range(len(self.world.inputs)))
        self.manifest = self._manifest(0, 0, 0, offsets, (), (), (), (0,) * self.world.block_partitions)
        self._written((yield from self._run(self.log.append(self.manifest))))
        yield from self._run(decision.finalize(self.manifest, {}, self.log.incarnation.incarnation, 0))

    def _references(self, manifest: Manifest) -> Generator[int | None, None, set[BlockRef]]:
        refs = {ref for log in manifest.order_logs for ref in log.blocks}
        for index in (each for operator in manifest.operators for each in operator.index):
            for ref in index:
                refs.update((ref, *(yield from self.block(ref))))
        return refs

    def block(self, ref: BlockRef) -> Steps:
        """The value of the block, which must be the one that was written."""
        answer = yield from self.world.until_answered(
            "fetch", TOPIC, ref.partition, ref.offset, Isolation.READ_UNCOMMITTED
        )
        for found in answer.records[:1]:
            if found.key == ref.key:
                return found.value
        require(self is not self.world.life, f"block {ref.key} is where the manifest says")
        raise Fenced("The checkpoints of a zombie have gone.")

    def _life(self) -> decision.Life:
        life = self.log.incarnation
        return decision.Life(
            "p", life.incarnation, self.attempt, "cluster", 2, self.world.transaction_timeout_ms, self._fenced_below
        )

    def _finish(self, manifest: Manifest, expire: decision.Expire) -> Steps:
        self.world.seen["finish"] += 1
        repairs = self.log.history.repairs_of(manifest.checkpoint)
        fates = yield from self._run(decision.finish(manifest, repairs, self._life(), 0, expire))
        self.world.note(f"{self} finishes checkpoint {manifest.checkpoint}: {sorted(set(fates.values()))}")
        for fate in fates.values():
            self.world.seen[fate] += 1

    def _sweep(self) -> Steps:
        life = self._life()
        older = self.world.oracle.older(life.incarnation, life.attempt)
        outputs = [(sink, p) for sink in self.world.sinks for p in range(self.world.output_partitions)]
        yield from self._run(
            sweep("p", life.incarnation, life.attempt, fenced_below=life.fenced_below, outputs=outputs)
        )
        self._fenced_below = (life.incarnation, life.attempt)
        self.world.oracle.swept(older)

    def _prepare_attempt(self, attempt: int, unfinished: Manifest | None) -> Steps:
        deadline_ms = self.world.deadline_ms()
        while (outcome := (yield from self._run(self.log.heartbeat()))) is Outcome.NOT_WRITTEN:
            if self.world.clock.monotonic_ms() >= deadline_ms:
                break
            yield self.world.clock.monotonic_ms() + 10
        self._written(outcome)
        self.attempt = attempt
        if unfinished is not None:
            yield from self._finish(unfinished, self.known_blocks.expire)
        yield from self._sweep()
        assert self.manifest is not None
        yield from self._run(self.known_blocks.begin_attempt(self.manifest, self.log.incarnation.incarnation, attempt))
        return self.manifest

    # --- decisions ----------------------------------------------------------------------------------------------

    def _decide(self, plan: core.PendingCheckpoint, pinned: set[int]) -> Steps:
        def made(committables: tuple[Committable, ...], ends: tuple[int, ...]) -> Manifest:
            offsets = tuple(sorted((o for ack in plan.acks.values() for o in ack.offsets), key=lambda o: o.partition))
            acks = [plan.acks["totals", i] for i in range(self.world.parallelism)]
            index = tuple(operator.index for ack in acks for operator in ack.operators)
            snapshot = OperatorSnapshot("totals", self.world.parallelism, 1, index)
            self.carries = any(c.checkpoint < plan.checkpoint for c in committables)
            self.world.seen["carried"] += self.carries
            logs = tuple(plan.order_logs)
            noted = self.known_blocks.ends_to_note(plan.checkpoint, plan.base, ends, final=plan.final)
            return self._manifest(
                plan.checkpoint, plan.base, plan.previous, offsets, (snapshot,), logs, committables, noted
            )

        def complete(manifest: Manifest) -> None:
            self.known_blocks.ledger.completed(manifest.checkpoint, references_of(plan, manifest))

        def expire(manifest: Manifest) -> requests.Procedure[decision.Dropped]:
            complete(manifest)
            return (yield from self.known_blocks.expire(manifest, pinned))

        verdict = yield from self._run(decision.decide(plan.precommits, plan.ages_ms, self._life(), made, expire))
        self.carries = False
        if isinstance(verdict, Decided):
            self.manifest = verdict.manifest
            if not verdict.finalized:
                complete(verdict.manifest)
            self.world.seen["refused commit"] += bool(verdict.commits.lost)
            self.world.seen["unknown commit"] += bool(verdict.commits.unknown)
        return verdict

    def _manifest(
        self,
        checkpoint: int,
        base: int,
        previous: int,
        offsets: tuple[SourceOffset, ...],
        operators: tuple[OperatorSnapshot, ...],
        order_logs: tuple[OrderLog, ...],
        committables: tuple[Committable, ...],
        ends: tuple[int, ...],
    ) -> Manifest:
        now_ms, world = self.world.clock.now_ms(), self.world
        return Manifest(
            "p", checkpoint, self.log.incarnation.incarnation, self.attempt, "checkpoint", base, previous,
            now_ms, now_ms, "fingerprint", 128, world.parallelism, world.block_partitions, ends, 0, offsets,
            operators, order_logs, committables, tuple((name, name, world.output_partitions) for name in world.sinks),
        )  # fmt: skip

    # --- requests -----------------------------------------------------------------------------------------------

    def _run(self, procedure: requests.Procedure[Any]) -> Steps:
        """Drive *procedure*, with a chance of faults before each request."""
        procedure = self.log.recording(procedure)
        try:
            request = next(procedure)
            while True:
                self.step_name = type(request).__name__
                self.world.faults.before_request(self)
                yield None
                try:
                    answer = yield from self._answer(request)
                except ExactlyOnceError as error:
                    request = procedure.throw(error)
                else:
                    request = procedure.send(answer)
        except StopIteration as end:
            return end.value

    def _answer(self, request: requests.Request) -> Steps:
        match request:
            case requests.DescribeTransactions(ids):
                return (yield from self._retrying("describe_transactions", ids))
            case requests.DescribeProducers(partitions):
                return (yield from self._retrying("describe_producers", partitions))
            case requests.ListTransactions(prefix):
                return (yield from self._retrying("list_transactions", prefix))
            case requests.EndTransactions(endings, commit):
                return (yield from self._ended(endings, commit))
            case requests.RewriteMarkers(name, producer_id, partitions, commit):
                return (yield from self._rewritten(name, producer_id, partitions, commit))
            case requests.Appended(records):
                self.world.seen["chain repaired"] += len(records) > 1
            case requests.BlockEndOffsets():
                return (yield from self._ends())
            case requests.ScanBlocks(start_offsets):
                return (yield from self._scanned(start_offsets))
            case requests.FindReferences(manifest):
                return frozenset((yield from self._references(manifest)))
            case requests.Look(committable):
                return (yield from self._looked(committable))
            case requests.CopyTransaction(committable, name):
                return (yield from copied(self, committable, name))
            case requests.ReplayTransaction(manifest, committable, name):
                return (yield from replayed(self, manifest, committable, name))
            case requests.Pause(duration_ms):
                yield self.world.clock.monotonic_ms() + duration_ms
            case _:
                return (yield from self._log_answers(request))
        return None

    def _ends(self) -> Generator[int | None, None, tuple[int, ...]]:
        ends = []
        for partition in range(self.world.block_partitions):
            answer = yield from self.world.until_answered("fetch", TOPIC, partition, 0, Isolation.READ_UNCOMMITTED)
            ends.append(answer.high_watermark)
        return tuple(ends)

    def _scanned(self, start_offsets: tuple[int, ...]) -> Generator[int | None, None, requests.Scanned]:
        """Blocks are read uncommitted, tombstones committed."""
        found: dict[str, BlockRef] = {}
        ends = [0]
        for partition in range(1, self.world.block_partitions):
            place = (TOPIC, partition, start_offsets[partition])
            settled = yield from self.world.until_answered("fetch", *place, Isolation.READ_COMMITTED)
            everything = yield from self.world.until_answered("fetch", *place, Isolation.READ_UNCOMMITTED)
            known = settled.last_stable_offset
            open_ = [each for each in everything.records if each.offset >= known and each.value is not None]
            for each in [*(record for record in settled.records if record.offset < known), *open_]:
                found.pop(each.key, None)
                if each.value is not None:
                    found[each.key] = reference(partition, each.offset, each.key, each.value)
            ends.append(everything.high_watermark)
        return requests.Scanned(tuple(found.values()), tuple(ends))

    def _retrying(self, operation: str, *arguments: Any) -> Steps:
        """Asked again until it is answered or time is up."""
        deadline_ms = self.world.deadline_ms()
        while True:
            try:
                return self.world.ask(operation, *arguments)
            except NoAnswer:
                if self.world.clock.monotonic_ms() >= deadline_ms:
                    raise BrokerUnavailable(f"{operation} was not answered") from None
                yield self.world.clock.monotonic_ms() + 10

    def _ended(self, endings: tuple[requests.Ending, ...], commit: bool) -> Steps:
        """An EndTxn whose answer is unknown is asked again as it was."""
        answers = []
        for each in endings:
            try:
                error = self.world.ask("end_txn", each.transactional_id, each.producer_id, each.epoch, commit)
                answers.append(ANSWERS[error])
                self.world.faults.after_end()
            except NoAnswer:
                answers.append(EndAnswer.BUSY)
            yield None
        return answers

    def _rewritten(
        self, name: str, producer_id: int, partitions: tuple[tuple[str, int], ...], commit: bool
    ) -> Steps:
        """A transaction without records at the id's present epoch; broken off at whatever stands in the way."""
        state = yield from self._described(name)
        require(state is not None and state.producer_id == producer_id, f"{name} is still that of its markers")
        try:
            for topic, partition in partitions:
                self.world.faults.before_request(self)
                yield None
                error = self.world.ask("add_to_transaction", name, producer_id, state.epoch, topic, partition)
                if error is not Error.NONE:
                    return
            self.world.faults.before_request(self)
            yield None
            self.world.ask("end_txn", name, producer_id, state.epoch, commit)
            self.world.seen["markers rewritten"] += 1
        except NoAnswer:
            pass

    def _looked(self, committable: Committable) -> Steps:
        """What readers see at the first record, once the last stable offset has passed it."""
        self.world.seen["look"] += 1
        first, ours = committable.written[0], (committable.producer_id, committable.epoch)
        while True:
            place = (first.topic, first.partition, first.first_offset)
            visible = yield from self.world.until_answered("fetch", *place, Isolation.READ_COMMITTED)
            if visible.last_stable_offset > first.first_offset:
                break
            yield self.world.clock.monotonic_ms() + LOOK_PAUSE_MS
        everything = yield from self.world.until_answered("fetch", *place, Isolation.READ_UNCOMMITTED)
        for fate, records in ((Fate.COMMITTED, visible.records[:1]), (Fate.ABORTED, everything.records[:1])):
            if [(each.offset, (each.producer_id, each.epoch)) for each in records] == [(first.first_offset, ours)]:
                return fate
        cleaned = place in self.world.broker.cleaned  # the marker that cleaning leaves behind shows it
        return Fate.ABORTED if cleaned else Fate.GONE

    def __str__(self) -> str:
        number = self.log.incarnation.incarnation if self.log.has_begun else 0
        return f"life {number}.{self.attempt}"
