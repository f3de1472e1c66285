"""The vocabulary of a checkpoint: acknowledgements, the checkpoint in flight, verdicts; the core's events and effects.

Invariants: all are immutable values except `PendingCheckpoint`, which only the coordinator changes. Its state moves as
`CHECKPOINT_TRANSITIONS` allows: any other move is a defect. Once `Decide` hands it out, its acknowledgements do not
change.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.manifest import (
    AbortedCheckpoint,
    BlockRef,
    ChannelLog,
    Manifest,
    OperatorSnapshot,
    OrderLog,
    Precommit,
    SourceOffset,
    StagedAck,
    SubtaskStats,
    named_by,
)
from exactlyonce.pipeline.errors import ExactlyOnceError, require

Subtask = tuple[str, int]
"""(task or sink id, index)."""


class OperatorAck(msgspec.Struct, frozen=True):
    """The state of one stateful operator in one subtask."""

    operator: str
    index: tuple[BlockRef, ...]
    blocks: tuple[BlockRef, ...]
    """All blocks that the index lists."""
    state_bytes: int


class LeftOut(msgspec.Struct, frozen=True):
    """The late records of one operator in one subtask that no output gets, since the attempt began."""

    operator: str
    records: int
    came: int
    """All records that have come to it."""


class Phases(msgspec.Struct, frozen=True):
    """The phases of a subtask's part of a checkpoint in their order, from its first barrier on, in ms."""

    aligning_ms: float
    """This and the later ones but `sync_ms`: see `SubtaskStats`."""
    sync_ms: float
    """The synchronous part of the snapshot: no record was taken meanwhile."""
    writing_ms: float
    """The rest of the snapshot."""
    capture_ms: float
    flush_ms: float

    @property
    def async_ms(self) -> float:
        """From the beginning of the snapshot to the acknowledgement."""
        return self.sync_ms + self.writing_ms + self.capture_ms + self.flush_ms


class Ack(msgspec.Struct, frozen=True):
    """A subtask's snapshot for a checkpoint is durable."""

    task: str
    subtask: int
    checkpoint: int
    offsets: tuple[SourceOffset, ...] = ()
    operators: tuple[OperatorAck, ...] = ()
    order_log: OrderLog | None = None
    channel_log: ChannelLog | None = None
    """None: there were no in-flight records, or the checkpoint is aligned."""
    on_their_way: tuple[BlockRef, ...] = ()
    """All blocks that `channel_log` lists, if it is indexed."""
    precommits: tuple[Precommit, ...] = ()
    staged: tuple[StagedAck, ...] = ()
    written: tuple[BlockRef, ...] = ()
    """Blocks that this checkpoint wrote."""
    declined: str = ""
    """Why the subtask has no snapshot: the checkpoint is aborted, and the rest of this acknowledgement carried on."""
    phases: Phases | None = None
    """None: not timed."""
    left_out: tuple[LeftOut, ...] = ()
    """Of each operator with event time, at the barrier."""
    goes_on: bool = False
    """Whether results are due, where the input has ended, that this checkpoint does not have: it is not the last."""

    def stats(self, after_ms: int | None) -> SubtaskStats:
        """Its figures; it came *after_ms* after the trigger, None: not known."""
        log = self.channel_log
        in_flight = self.on_their_way or (log.blocks if log is not None else ())
        stats = SubtaskStats(
            task=self.task,
            subtask=self.subtask,
            state_bytes=sum(operator.state_bytes for operator in self.operators),
            written_bytes=sum(ref.size for ref in self.written),
            records_in_flight=log.records if log is not None else 0,
            bytes_in_flight=sum(ref.size for ref in in_flight),
        )
        if self.phases is None or after_ms is None:
            return stats
        times = self.phases
        aligning, capture, flush = map(round, (times.aligning_ms, times.capture_ms, times.flush_ms))
        snapshot = round(times.sync_ms + times.writing_ms)
        waiting = max(0, after_ms - aligning - snapshot - capture - flush)
        return msgspec.structs.replace(
            stats, waiting_ms=waiting, aligning_ms=aligning, snapshot_ms=snapshot, capture_ms=capture, flush_ms=flush
        )


# --- a checkpoint in flight, and what becomes of it ----------------------------------------------------------------


class CheckpointState(enum.Enum):
    TRIGGERED = "triggered"
    ACKNOWLEDGED = "acknowledged"
    DECIDING = "deciding"
    COMPLETED = "completed"
    """Decided: finalized as well, or finished by the restart that follows."""
    ABORTED = "aborted"


CHECKPOINT_TRANSITIONS: dict[CheckpointState, frozenset[CheckpointState]] = {
    CheckpointState.TRIGGERED: frozenset({CheckpointState.ACKNOWLEDGED, CheckpointState.ABORTED}),
    CheckpointState.ACKNOWLEDGED: frozenset({CheckpointState.DECIDING, CheckpointState.ABORTED}),
    CheckpointState.DECIDING: frozenset({CheckpointState.COMPLETED, CheckpointState.ABORTED}),
    CheckpointState.COMPLETED: frozenset(),
    CheckpointState.ABORTED: frozenset(),
}


@dataclass(kw_only=True)
class PendingCheckpoint:
    """A checkpoint in flight, with its acknowledgements."""

    checkpoint: int
    base: int
    previous: int
    final: bool
    triggered_ms: int
    attempt: int
    timeout_ms: int = 0
    """The coordinator's, from its trigger to the last acknowledgement."""
    deciding_since_ms: int = 0
    requests: tuple[str, ...] = ()
    """The requests that this savepoint serves; empty: it is none."""
    state: CheckpointState = CheckpointState.TRIGGERED
    acks: dict[Subtask, Ack] = field(default_factory=dict)
    acked_ms: dict[Subtask, int] = field(default_factory=dict)
    """When each came, after the trigger."""
    aborted: tuple[AbortedCheckpoint, ...] = ()
    """The checkpoints that were aborted since the last completed one."""
    precommits: list[Precommit] = field(default_factory=list)
    """The output that its manifest will carry, also of aborted checkpoints before it; so in the next two."""
    staged: list[StagedAck] = field(default_factory=list)
    order_logs: list[OrderLog] = field(default_factory=list)
    ages_ms: dict[str, int] = field(default_factory=dict)
    """How long each precommit's transaction has been open, by transactional id."""
    outputs_by_partition: tuple[tuple[str, int], ...] = ()
    """See `Manifest.outputs_by_partition`."""

    @classmethod
    def of(
        cls,
        acks: Sequence[Ack],
        precommits: Iterable[Precommit] = (),
        *,
        base: int,
        triggered_ms: int,
        attempt: int,
        final: bool = False,
        **more: Any,
    ) -> PendingCheckpoint:
        """The checkpoint right after *base*, for which all *acks* are here. Its manifest will carry their output, that
        of *precommits*, and none of a checkpoint before it."""
        return cls(
            checkpoint=acks[0].checkpoint,
            base=base,
            previous=base,
            final=final,
            triggered_ms=triggered_ms,
            attempt=attempt,
            acks={(ack.task, ack.subtask): ack for ack in acks},
            precommits=[*chain.from_iterable(ack.precommits for ack in acks), *precommits],
            staged=[*chain.from_iterable(ack.staged for ack in acks)],
            order_logs=[ack.order_log for ack in acks if ack.order_log is not None],
            **more,
        )

    def move(self, state: CheckpointState) -> None:
        """Change state, as the table allows."""
        require(state in CHECKPOINT_TRANSITIONS[self.state], f"a checkpoint moves from {self.state} to {state}")
        self.state = state

    @property
    def operators(self) -> tuple[OperatorSnapshot, ...]:
        """Per operator, the index blocks of its subtasks in order."""
        by_operator: dict[str, dict[int, OperatorAck]] = {}
        for (_, subtask), ack in self.acks.items():
            for operator in ack.operators:
                by_operator.setdefault(operator.operator, {})[subtask] = operator
        return tuple(
            OperatorSnapshot(
                name, len(acks), sum(a.state_bytes for a in acks.values()), tuple(acks[i].index for i in sorted(acks))
            )
            for name, acks in sorted(by_operator.items())
        )

    def listed(self) -> Iterator[BlockRef]:
        """The blocks that it needs and its indexes list: state, in-flight records, staged output."""
        for ack in self.acks.values():
            for operator in ack.operators:
                yield from operator.blocks
            yield from ack.on_their_way
        for staged in self.staged:
            yield from staged.blocks

    def references(self, manifest: Manifest) -> Iterator[BlockRef]:
        """All blocks that *manifest*, made from it, needs; some may come twice."""
        yield from named_by(manifest)
        yield from self.listed()


@dataclass(frozen=True)
class Refuse:
    """The checkpoint was not decided: it never happened."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Decided:
    """The manifest is durable; finalized too, unless a commit was refused or its fate is unknown."""

    manifest: Manifest
    fates: Mapping[str, str] = field(default_factory=dict)
    unsettled: Mapping[str, str] = field(default_factory=dict)
    """See `decision.Fates`."""
    decided_at_ms: int = field(default=0, compare=False)
    """When the manifest was durable."""
    committed_at_ms: int = field(default=0, compare=False)
    """When all fates were known; this and the other in ms since 1970."""

    @property
    def finalized(self) -> bool:
        """Whether every committable is known to be committed."""
        return not self.unsettled


@dataclass(frozen=True)
class Unresolved:
    """It is unknown whether the manifest is durable: the process must end, and the next incarnation reads the log."""

    checkpoint: int


Verdict = Decided | Refuse | Unresolved


# --- events ---------------------------------------------------------------------------------------------------------


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. The texts are for people, to explain why something is late."""

    hanging: str = ""
    """The workers that hang, or are not ready yet: which, where, and for how long."""
    slow: str = ""
    """The operators that take most of their workers' time."""


class Recovered(msgspec.Struct, frozen=True):
    """The highest checkpoint is finalized and older transactions are fenced: the job may start from *manifest*."""

    manifest: Manifest
    transaction_timeout_ms: int
    """The broker ends a transaction that is open longer."""


class Deployed(msgspec.Struct, frozen=True):
    """Every worker has restored its state."""


class ProducerGranted(msgspec.Struct, frozen=True):
    """A sink subtask has one more producer ready, counting the one that it writes with now."""

    sink: str
    subtask: int


class Acknowledged(msgspec.Struct, frozen=True):
    ack: Ack


class Concluded(msgspec.Struct, frozen=True):
    checkpoint: int
    verdict: Verdict


class Failed(msgspec.Struct, frozen=True):
    """A worker died, or something it needs failed; *error* if no restart can help."""

    reason: str
    error: ExactlyOnceError | None = None
    counts: bool = True
    """Whether the restart strategy is asked; else the job restarts at once, however often."""


class SourcesFinished(msgspec.Struct, frozen=True):
    """Every source of a bounded job has reached its target."""


class Room(msgspec.Struct, frozen=True):
    """Whether a worker's disk has room for its state."""

    worker: int
    has_room: bool


class Stop(msgspec.Struct, frozen=True):
    """The user asked for a clean stop."""


OfWorkers = Deployed | ProducerGranted | Acknowledged | Room | SourcesFinished


class SavepointAsked(msgspec.Struct, frozen=True):
    """The user asked for a savepoint; *stop*: and for a clean stop after it. It may be asked again."""

    request: str
    stop: bool = False


class CancelAsked(msgspec.Struct, frozen=True):
    """The user asked to cancel the run, without a last checkpoint. It may be asked again."""

    request: str


Event = Tick | Recovered | Concluded | Failed | Stop | SavepointAsked | CancelAsked | OfWorkers

# --- effects --------------------------------------------------------------------------------------------------------


class Trigger(msgspec.Struct, frozen=True):
    """Tell every source subtask to note Sn and inject barrier *checkpoint*; after a final one nothing more is read."""

    checkpoint: int
    base: int
    final: bool
    savepoint: bool = False
    """Whether it is a savepoint: aligned in every mode, with its state written whole."""
    overtakes_after_ms: int | None = None
    """How long the barrier waits before it overtakes records; None: it never overtakes."""


class Decide(msgspec.Struct, frozen=True):
    """Run the decision procedure for *plan*."""

    plan: PendingCheckpoint


class AnnounceFinalized(msgspec.Struct, frozen=True):
    """Tell workers that *checkpoint* is finalized: its transactional ids are free."""

    checkpoint: int


class Hold(msgspec.Struct, frozen=True):
    """Tell every source to read nothing but barriers, or to go on."""

    held: bool


class Restart(msgspec.Struct, frozen=True):
    """Kill all workers, wait for them, finish what was decided, fence older attempts; then `Recovered`.

    *reason* is empty if nothing failed: a stop came while workers were starting, or the job is cancelled.
    """

    attempt: int
    delay_ms: int
    reason: str


class Deploy(msgspec.Struct, frozen=True):
    """Start workers that restore *manifest*; then `Deployed`."""

    attempt: int
    manifest: Manifest


class End(msgspec.Struct, frozen=True):
    """The job is over: cleanly after *manifest*, or with *error*."""

    manifest: Manifest | None
    error: ExactlyOnceError | None
    cancelled: str = ""
    """The request that cancelled it; empty: it was not cancelled."""
    short: str = ""
    """Why a stop got no last checkpoint; empty: it got one, or needed none."""


class Note(msgspec.Struct, frozen=True):
    text: str


Effect = Trigger | Decide | AnnounceFinalized | Hold | Restart | Deploy | End | Note
