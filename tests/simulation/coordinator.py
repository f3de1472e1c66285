"""One incarnation of the simulated coordinator: the real core and procedures, and the glue that an engine adds.

Like an engine it feeds the core from one thread and asks the broker from another, one procedure after the other. It can
be paused or killed before every single request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from answers import LogAnswers, SimulatedTopics, scanned
from clients import TOPIC, Steps
from repair import copied, replayed
from restored import judge_behind_the_fence, restored, savepoint_to_restore
from stores import StoreAnswers
from watched_leader import WatchedLeader

from exactlyonce.checkpoint import events, requests
from exactlyonce.checkpoint.block_storage import DamagedBlock
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.decision import Decided
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.encoding import Block, decode
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, Manifest
from exactlyonce.checkpoint.references import indexes_of, stands_on
from exactlyonce.checkpoint.restart import ExponentialDelay
from exactlyonce.checkpoint.states import JobState
from exactlyonce.checkpoint.transactions.broker_answers import EndAnswer, Fate
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import ANSWERS
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.runtime.in_flight import listed_in
from exactlyonce.engines.savepoints.restoring import Restoring
from exactlyonce.engines.surroundings.pipeline_topics import PipelineTopics
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, Fenced, require
from exactlyonce.sinks.write_ahead.writer import INDEXED
from exactlyonce.sinks.write_ahead.writer import decode_index as list_of_rows
from exactlyonce.state.index import decode_index
from exactlyonce.testing.broker.interface import Error, Isolation, NoAnswer

if TYPE_CHECKING:
    from processes import Process
    from world import World

LOOK_PAUSE_MS = 20
LOOK_TIMEOUT_MS = 30_000
"""By then the broker has ended whatever is open and was not lost."""
UPKEEP_INTERVAL_MS = 2_000


class ReadersHeld(BrokerUnavailable):
    """A look at records gave up: an open transaction holds readers before them."""


class SimulatedCoordinator:
    def __init__(self, world: World) -> None:
        self.world = world
        self.alive, self.paused_until_ms = True, 0
        self.end: events.End | None = None
        self.scale = scale = world.scale
        self.stores = StoreAnswers(self)
        self.core = Coordinator(
            world.settings, ExponentialDelay(20, 200), scale.subtasks, scale.sink_subtasks,
            staging=bool(self.stores.staging), loops=bool(world.topology.loops),
        )  # fmt: skip
        self.log = DecisionLog("p", world.topic, world.clock, world.deadline_ms() - world.clock.monotonic_ms())
        self.leader = WatchedLeader(self, self.log)
        self._log_answers = LogAnswers(world)
        self._topics = PipelineTopics(
            cast(Topics, SimulatedTopics(world)), world.graph, self.scale.parallelism, world.note,
            bounded=False,
        )  # fmt: skip
        self._restoring: Restoring | None = None
        self.workers: list[Process] = []
        self.step_name = "open"
        self._asking = False
        """Whether the broker thread is in a procedure."""
        self.cancelled_behind: int | None = None
        """The last checkpoint that may be decided, once somebody has cancelled the run."""
        self.reads_more = False
        """Whether an input got a partition meanwhile. The real run to an end takes none; here it is read, and nobody
        waits for its end."""
        self.carries = False
        """Whether the checkpoint that is being decided carries output of aborted ones."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._jobs: deque[tuple[Callable[[], Steps], Callable[[Any], None]]] = deque()
        self._finished: set[tuple[str, int]] = set()
        self._restored: set[int] = set()
        self._deploy: tuple[int, events.Deploy] | None = None
        self._delay_ms = 0
        self._upkeep_at_ms = world.clock.monotonic_ms() + UPKEEP_INTERVAL_MS
        world.spawn(self, self._main())
        world.spawn(self, self._broker())

    # --- threads ------------------------------------------------------------------------------------------------

    def _main(self) -> Steps:
        self._on_broker(self._open, lambda manifest: self._feed(events.Recovered(manifest)))
        while self.end is None:
            if self._inbox:
                self._inbox.popleft()()
            now_ms = self.world.clock.monotonic_ms()
            if now_ms >= self._upkeep_at_ms and self.core.state is JobState.RUNNING:
                self._upkeep_at_ms = now_ms + UPKEEP_INTERVAL_MS
                self._on_broker(lambda: self._run(self.leader.upkeep()), lambda _: None)
            if self._deploy is not None and self._deploy[0] <= now_ms:
                self._start_workers(self._deploy[1])
            if self.core.state is JobState.RUNNING:  # before, it has no number by which people could address it
                for request, stop in [*self.world.oracle.savepoints.asked.items()]:
                    self._feed(events.SavepointAsked(request, stop))
            self._feed(events.Tick())
            yield None if self._inbox else now_ms + 3
        if self.end.error is None:
            yield from self._conclude()
        self.world.ended(self, self.end)

    def _conclude(self) -> Steps:
        self.kill_workers()
        while self._asking:  # procedures never overlap
            yield self.world.clock.monotonic_ms() + 1
        try:
            assert self.end is not None
            yield from self._run(self.leader.conclude(self.end.cancelled))
        except ExactlyOnceError as error:
            self.end = events.End(None, error)

    def _broker(self) -> Steps:
        while self.end is None:
            if not self._jobs:
                yield self.world.clock.monotonic_ms() + 3
                continue
            call, then = self._jobs.popleft()
            self._asking = True
            try:
                result = yield from call()
            except ExactlyOnceError as error:
                self._inbox.append(partial(self._stop_with, error))
            else:
                self._inbox.append(partial(then, result))
            self._asking = False

    def _stop_with(self, error: ExactlyOnceError) -> None:
        self.end = self.end or events.End(None, error)

    def _on_broker(self, call: Callable[[], Steps], then: Callable[[Any], None]) -> None:
        self._jobs.append((call, then))

    def _feed(self, event: events.Event) -> None:
        for effect in self.core.handle(event, self.world.clock.monotonic_ms()):
            self._perform_effect(effect)

    def stop(self) -> None:
        self._inbox.append(lambda: self._feed(events.Stop()))

    def cancel(self) -> None:
        self._inbox.append(self._cancelled)

    def _cancelled(self) -> None:
        newest = self.log.history.latest
        if not self.log.has_begun or newest is None or self.end is not None:
            return  # then it has no number by which people could address it, or is over
        if self.cancelled_behind is None:
            deciding = self.core.deciding
            self.cancelled_behind = deciding.checkpoint if deciding is not None else newest.checkpoint
        self._feed(events.CancelAsked("cancel"))

    def delete_savepoint(self, savepoint: int) -> None:
        if not self.log.has_begun or self.core.state is not JobState.RUNNING:
            return  # then nobody reads the request
        incarnation, pinned = self.log.incarnation.incarnation, tuple(self.core.pinned)
        savepoints = self.world.oracle.savepoints
        savepoints.kept.discard(savepoint)
        self._on_broker(
            lambda: self._run(self.leader.forget_savepoint(savepoint, pinned)),
            lambda _: savepoints.deleted(savepoint, incarnation),
        )

    # --- effects ------------------------------------------------------------------------------------------------

    def _perform_effect(self, effect: events.Effect) -> None:
        match effect:
            case events.Trigger(checkpoint, base, final, savepoint, overtakes_after_ms):
                incarnation = self.log.incarnation.incarnation
                self.world.oracle.savepoints.triggered(incarnation, checkpoint, final=final, savepoint=savepoint)
                aligned_chance = self.world.luck.aligned_chance
                aligned = bool(aligned_chance) and self.world.rng.random() < aligned_chance
                overtakes_after_ms = None if aligned else overtakes_after_ms
                if aligned or (final and not self.world.topology.loops):
                    self.world.oracle.aligned.add((incarnation, self.core.attempt, checkpoint))
                for worker in self.workers:
                    added = self.world.share(self._topics.added, self.scale.parallelism, worker.index)
                    worker.tell(msg.Trigger(checkpoint, base, final, added, savepoint, overtakes_after_ms))
            case events.Decide(plan):
                pinned = self.core.pinned
                self._on_broker(
                    lambda: self._run(self.leader.decide(plan, pinned)), lambda verdict: self._concluded(plan, verdict)
                )  # fmt: skip
            case events.AnnounceFinalized(checkpoint):
                for worker in self.workers:
                    worker.tell(msg.CheckpointFinalized(checkpoint))
            case events.Hold(held):
                self.world.seen["held" if held else "held no more"] += 1
                for worker in self.workers:
                    worker.tell(msg.Hold(held))
            case events.Restart(attempt, delay_ms, reason):
                self.world.note(f"{self} restarts: {reason}")
                self.world.oracle.savepoints.restarted(self.log.incarnation.incarnation)
                self.kill_workers()
                self._delay_ms, self._deploy = delay_ms, None
                self._on_broker(
                    lambda: self._run(self.leader.begin_attempt(attempt)),
                    lambda manifest: self._feed(events.Recovered(manifest)),
                )
            case events.Deploy():
                self._deploy = (self.world.clock.monotonic_ms() + self._delay_ms, effect)
            case events.End():
                self.end = self.end or effect
            case events.Note(text):
                self.world.seen["aborted checkpoint"] += 1
                self.world.note(f"{self}: {text}")

    def _concluded(self, plan: events.PendingCheckpoint, verdict: Any) -> None:
        self.carries = False
        if isinstance(verdict, Decided):
            self.world.seen["refused commit"] += "refused" in verdict.unsettled.values()
            self.world.seen["unknown commit"] += "unknown" in verdict.unsettled.values()
        reason = getattr(verdict, "reason", "")
        self.world.note(f"{self}: checkpoint {plan.checkpoint}: {type(verdict).__name__} {reason}")
        self._feed(events.Concluded(plan.checkpoint, verdict))

    def _start_workers(self, deploy: events.Deploy) -> None:
        self._deploy = None
        self._restored, self._finished = set(), set()
        incarnation = self.log.incarnation.incarnation
        self.workers = self.world.start_workers(
            self, incarnation, deploy.attempt, deploy.manifest, self._topics.offsets
        )

    def kill_workers(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []

    # --- what workers say ---------------------------------------------------------------------------------------

    def hear(self, worker: Process, what: str, *details: Any) -> None:
        """A message from *worker*; from one of another attempt it is not read."""
        self._inbox.append(lambda: self._heard(worker, what, *details) if worker in self.workers else None)

    def _heard(self, worker: Process, what: str, *details: Any) -> None:
        match what, *details:
            case "restored", *_:
                self._restored.add(worker.index)
                if len(self._restored) == len(self.workers):
                    self._feed(events.Deployed())
            case "prepared", sink, name:
                self._on_broker(
                    lambda: self._described(name), lambda state: self._grant(worker, sink, name, state)
                )  # fmt: skip
            case "acknowledged", ack:
                self.leader.acknowledged(ack)
                self._on_broker(lambda: self._run(self.leader.count_acknowledged()), lambda _: None)
                self._feed(events.Acknowledged(ack))
            case "source finished", task, subtask:
                self._finished.add((task, subtask))
                if self._finished == self.scale.source_subtasks:
                    self._feed(events.SourcesFinished())
            case "failed", reason, error:
                self._feed(events.Failed(reason, error))

    def _described(self, name: str) -> Steps:
        states = yield from self.world.until_answered("describe_transactions", [name])
        return states[name]

    def _grant(self, worker: Process, sink: str, name: str, state: Any) -> None:
        """Producer id and epoch are read between the producer's initialisation and its first record."""
        if worker not in self.workers:
            return
        if state is None or state.state != "Empty":
            self._feed(events.Failed(f"{name} is not Empty"))
            return
        worker.tell(msg.Granted(sink, name, state.producer_id, state.epoch))
        self._feed(events.ProducerGranted(sink, worker.index))

    # --- recovery -----------------------------------------------------------------------------------------------

    def _open(self) -> Steps:
        self._topics.look_at_inputs()
        self._topics.look_at_outputs()
        self._restoring = yield from savepoint_to_restore(self, self._topics.inputs)
        yield from self._run(self.leader.begin())
        if self._restoring is not None:
            judge_behind_the_fence(self, self._restoring)
        return (yield from self._run(self.leader.recover()))

    def _references(self, manifest: Manifest) -> Generator[int | None, None, set[BlockRef]]:
        listed: list[BlockRef] = []
        for ref in indexes_of(manifest):
            listed += [each.ref for each in decode_index((yield from self.block(ref))).blocks]
        for ref in (ref for each in manifest.staged if each.body == INDEXED for ref in each.blocks):
            listed += list_of_rows((yield from self.block(ref)))
        for log in manifest.channel_logs:
            listed += yield from self.blocks_of(log)
        return stands_on(manifest, listed)

    def blocks_of(self, log: ChannelLog) -> Generator[int | None, None, list[BlockRef]]:
        found: list[BlockRef] = []
        for ref in log.blocks:
            found += listed_in((yield from self.block(ref))) if log.indexed else [ref]
        return found

    def block(self, ref: BlockRef) -> Steps:
        if (outside := self.world.outside) is not None:
            with suppress(DamagedBlock):
                return (yield from outside.until_answered(partial(outside.block, ref))).body
            require(not self.world.is_newest(self), f"block {ref.key} is there, as the manifest says")
            raise Fenced("The checkpoints of a zombie have gone.")
        answer = yield from self.world.until_answered(
            "fetch", TOPIC, ref.partition, ref.offset, Isolation.READ_UNCOMMITTED
        )
        for found in answer.records[:1]:
            if (found.offset, found.key) == (ref.offset, ref.key):
                return decode(found.value, Block).body
        require(not self.world.is_newest(self), f"block {ref.key} is where the manifest says")
        raise Fenced("The checkpoints of a zombie have gone.")

    # --- requests -----------------------------------------------------------------------------------------------

    def _run(self, procedure: requests.Procedure[Any]) -> Steps:
        return requests.relayed(procedure, self._asked)

    def _asked(self, request: requests.Request) -> Steps:
        self.step_name = type(request).__name__
        if isinstance(request, requests.Reached) and request.place.startswith("store-"):
            self.step_name = request.place
        self.world.faults.before_request(self)
        yield None
        return (yield from self._answer(request))

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
            case requests.RewriteMarkers():
                return (yield from self._rewritten(request))
            case requests.Together(several):
                return (yield from self._answer_all(several))
            case requests.Appended(records):
                self.world.seen["chain repaired"] += len(records) > 1
                self._note_carried(records)
            case requests.Reached():
                pass
            case requests.ScanBlocks(start_offsets, storage):
                if storage and self.world.outside is not None:
                    return (yield from self.world.outside.scanned(start_offsets))
                return (yield from scanned(self.world, start_offsets))
            case requests.RemoveBlocks(blocks):
                assert self.world.outside is not None, "blocks lie outside of the topic"
                self.world.outside.let_go(self, [each.ref for each in blocks])
            case requests.FindReferences(manifest):
                if self.world.faults.unread(request):
                    assert self.world.outside is not None
                    self.world.outside.not_known[self.log.incarnation.incarnation].add(manifest.checkpoint)
                    self.world.seen["references not known"] += 1
                    return "it is away"
                return frozenset((yield from self._references(manifest)))
            case requests.RestoreSavepoint(checkpoint):
                assert self._restoring is not None
                return restored(self, self._restoring, checkpoint)
            case requests.Look(committable):
                return (yield from self._looked(committable))
            case requests.CopyTransaction(committable, name):
                return (yield from copied(self, committable, name))
            case requests.ReplayTransaction(manifest, committable, name):
                return (yield from replayed(self, manifest, committable, name))
            case requests.FenceStore() | requests.CleanStore() | requests.CommitStaged():
                return (yield from self.stores(request))
            case requests.Pause(duration_ms):
                yield self.world.clock.monotonic_ms() + duration_ms
            case _:
                answer = self._topics(request)
                return (yield from self._log_answers(request)) if answer is NotImplemented else answer
        return None

    def _note_carried(self, records: tuple[Any, ...]) -> None:
        for each in records:
            if isinstance(each, Manifest):
                self.carries = any(c.checkpoint < each.checkpoint for c in each.committables)
                self.world.seen["carried"] += self.carries
                if any(c.checkpoint < each.checkpoint for c in each.staged):
                    self.world.seen["rows carried"] += 1

    def _answer_all(self, several: tuple[requests.Request, ...]) -> Steps:
        answers: dict[int, requests.Answer] = {}
        for number in self.world.faults.shuffled(range(len(several))):
            try:
                answers[number] = requests.Answer((yield from self._asked(several[number])))
            except ExactlyOnceError as error:
                answers[number] = requests.Answer(error=error)
        return tuple(answers[number] for number in range(len(several)))

    def _retrying(self, operation: str, *arguments: Any) -> Steps:
        deadline_ms = self.world.deadline_ms()
        while True:
            try:
                return self.world.ask(operation, *arguments)
            except NoAnswer:
                if self.world.clock.monotonic_ms() >= deadline_ms:
                    raise BrokerUnavailable(f"{operation} was not answered") from None
                yield self.world.clock.monotonic_ms() + 10

    def _ended(self, endings: tuple[requests.Ending, ...], commit: bool) -> Steps:
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

    def _rewritten(self, request: requests.RewriteMarkers) -> Steps:
        """A transaction without records at the id's epoch; broken off at whatever stands in the way."""
        name, producer_id, epoch, commit = request.transactional_id, request.producer_id, request.epoch, request.commit
        try:
            for topic, partition in request.partitions:
                self.world.faults.before_request(self)
                yield None
                error = self.world.ask("add_to_transaction", name, producer_id, epoch, topic, partition)
                if error is not Error.NONE:
                    return
            self.world.faults.before_request(self)
            yield None
            self.world.ask("end_txn", name, producer_id, epoch, commit)
            self.world.seen["markers rewritten"] += 1
        except NoAnswer:
            pass

    def _looked(self, committable: Committable) -> Steps:
        """What readers see at the first record, once the last stable offset has passed it."""
        self.world.seen["look"] += 1
        first, ours = committable.written[0], (committable.producer_id, committable.epoch)
        deadline_ms = self.world.clock.monotonic_ms() + LOOK_TIMEOUT_MS
        while True:
            place = (first.topic, first.partition, first.first_offset)
            visible = yield from self.world.until_answered("fetch", *place, Isolation.READ_COMMITTED)
            if visible.last_stable_offset > first.first_offset:
                break
            if self.world.clock.monotonic_ms() > deadline_ms:
                raise ReadersHeld(f"readers of {first.topic}-{first.partition} are held by an open transaction")
            yield self.world.clock.monotonic_ms() + LOOK_PAUSE_MS
        everything = yield from self.world.until_answered("fetch", *place, Isolation.READ_UNCOMMITTED)
        for fate, records in ((Fate.COMMITTED, visible.records[:1]), (Fate.ABORTED, everything.records[:1])):
            if [(each.offset, (each.producer_id, each.epoch)) for each in records] == [(first.first_offset, ours)]:
                return fate
        cleaned = place in self.world.broker.cleaned  # the marker that cleaning leaves behind shows it
        return Fate.ABORTED if cleaned else Fate.GONE

    @property
    def number(self) -> int:
        return self.log.incarnation.incarnation if self.log.has_begun else 0

    def __str__(self) -> str:
        return f"incarnation {self.number}.{self.leader.attempt}"
