"""The vocabulary of the coordinator's core: acknowledgements, the events it takes, the effects it asks for.

Invariants: all of them are immutable values but `PendingCheckpoint`, which the coordinator alone changes. Its state
moves as the table in `checkpoint.states` allows; once `Decide` hands it out, its acknowledgements stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from exactlyonce.checkpoint.commits.protocol import Refuse
from exactlyonce.checkpoint.decision import Decided, Unresolved
from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, Manifest, OrderLog, SourceOffset, StagedAck
from exactlyonce.checkpoint.states import CHECKPOINT_TRANSITIONS, CheckpointState
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


class Ack(msgspec.Struct, frozen=True):
    """A subtask's snapshot for a checkpoint is durable."""

    task: str
    subtask: int
    checkpoint: int
    offsets: tuple[SourceOffset, ...] = ()
    operators: tuple[OperatorAck, ...] = ()
    order_log: OrderLog | None = None
    channel_log: ChannelLog | None = None
    """None: nothing was on its way, or the checkpoint is aligned."""
    on_their_way: tuple[BlockRef, ...] = ()
    """All blocks that `channel_log` lists, where it is indexed."""
    precommits: tuple[Precommit, ...] = ()
    staged: tuple[StagedAck, ...] = ()
    written: tuple[BlockRef, ...] = ()
    """Blocks that this checkpoint wrote."""
    declined: str = ""
    """Why the subtask has no snapshot: the checkpoint cannot complete, and what else it acknowledges is carried on."""


# --- events ---------------------------------------------------------------------------------------------------------


class Tick(msgspec.Struct, frozen=True):
    """Time has passed. Nothing follows from the texts: they are for who reads why something is late."""

    hanging: str = ""
    """The workers that do not come back from something, or are not ready yet: which, from what, and for how long."""
    slow: str = ""
    """The operators that take most of their workers' time."""


class Recovered(msgspec.Struct, frozen=True):
    """The highest checkpoint is finalized and older transactions are fenced: the job may start from *manifest*."""

    manifest: Manifest


class Deployed(msgspec.Struct, frozen=True):
    """Every worker has restored its state."""


class ProducerGranted(msgspec.Struct, frozen=True):
    """A sink subtask has one more producer ready: the one it writes with now counts, and the one to come after it."""

    sink: str
    subtask: int


class Acknowledged(msgspec.Struct, frozen=True):
    """A subtask acknowledged."""

    ack: Ack


class Concluded(msgspec.Struct, frozen=True):
    """The decision procedure ended."""

    checkpoint: int
    verdict: Decided | Refuse | Unresolved


class Failed(msgspec.Struct, frozen=True):
    """A worker died, or something it needs failed; *error* where no restart can help."""

    reason: str
    error: ExactlyOnceError | None = None
    counts: bool = True
    """Whether the restart strategy is asked; else the job restarts at once, however often."""


class SourcesFinished(msgspec.Struct, frozen=True):
    """Every source of a bounded job has reached its target."""


class Room(msgspec.Struct, frozen=True):
    """Whether the state of a worker finds room on its disk."""

    worker: int
    found: bool


class Stop(msgspec.Struct, frozen=True):
    """The user asked for a clean stop."""


OfWorkers = Deployed | ProducerGranted | Acknowledged | Room | SourcesFinished


class SavepointAsked(msgspec.Struct, frozen=True):
    """Somebody asks for a savepoint; *stop*: and for a clean stop behind it. Asked again, it is the same request."""

    request: str
    stop: bool = False


class CancelAsked(msgspec.Struct, frozen=True):
    """Somebody asks the run to end as cancelled: without a last checkpoint. Asked again, it is the same request."""

    request: str


Event = Tick | Recovered | Concluded | Failed | Stop | SavepointAsked | CancelAsked | OfWorkers

# --- effects --------------------------------------------------------------------------------------------------------


class Trigger(msgspec.Struct, frozen=True):
    """Tell every source subtask to note Sn and inject barrier *checkpoint*; after a final one nothing more is read."""

    checkpoint: int
    base: int
    final: bool
    savepoint: bool = False
    """Whether it is one: aligned whatever the mode, and its state is written whole."""
    overtakes_after_ms: int | None = None
    """How long from now it waits behind the records before it; None: however long that takes, it must be aligned."""


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

    *reason* is empty where nothing failed: a stop was asked for while workers were starting, or the job is cancelled.
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
    """The request by which it was cancelled; empty: it was not."""
    short: str = ""
    """Why a stop got no last checkpoint; empty: it got one, or needed none."""


class Note(msgspec.Struct, frozen=True):
    """Something the log should say."""

    text: str


Effect = Trigger | Decide | AnnounceFinalized | Hold | Restart | Deploy | End | Note


@dataclass(kw_only=True)
class PendingCheckpoint:
    """A checkpoint in flight: what has been acknowledged for it."""

    checkpoint: int
    base: int
    previous: int
    final: bool
    triggered_ms: int
    attempt: int
    deciding_since_ms: int = 0
    requests: tuple[str, ...] = ()
    """It is the savepoint that these ask for; none: it is no savepoint."""
    state: CheckpointState = CheckpointState.TRIGGERED
    acks: dict[Subtask, Ack] = field(default_factory=dict)
    precommits: list[Precommit] = field(default_factory=list)
    """All that its manifest will carry: its own and those of aborted checkpoints before it."""
    staged: list[StagedAck] = field(default_factory=list)
    """Likewise."""
    order_logs: list[OrderLog] = field(default_factory=list)
    """Likewise."""
    ages_ms: dict[str, int] = field(default_factory=dict)
    """How long each precommit's transaction has been open, by transactional id."""

    def move(self, state: CheckpointState) -> None:
        """Change state, as the table allows."""
        require(state in CHECKPOINT_TRANSITIONS[self.state], f"a checkpoint moves from {self.state} to {state}")
        self.state = state
