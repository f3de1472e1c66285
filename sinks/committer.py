"""The seam between a leader and a sink whose store keeps a ledger: the committer of what its writers have staged.

Invariant: any process may repeat a request at any time, and its effect comes once; the ledger decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.dead_letters import DeadLetterLimits
from exactlyonce.sinks.ledger import SinkLedger

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.client_config import ClientConfig


class Committer(Protocol):
    """The committer of one sink, for one thread at a time.

    Each method raises `StoreUnavailable` if the store does not answer, which proves nothing, and `StoreError` if it
    refuses; `fence` and `commit` also `ForeignLedger`, `LedgerBehind` and `Fenced`.
    """

    @property
    def kind(self) -> str:
        """The `StoreCommittable.kind` that it commits."""

    @property
    def ledger(self) -> str:
        """The place of the sink's ledger, for an operator who has to look at it or empty it. It holds no secret, and
        the store is not asked."""

    def check(self) -> None:
        """Raise unless the store can take what the sink writes. Creates only what the sink is to create."""

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """Fence all older incarnations; -> by subtask, the checkpoint in the ledger. See
        `checkpoint.requests.FenceStore`."""

    def clean(self, incarnation: int, attempt: int) -> None:
        """Drop what older attempts have staged outside of the checkpoint topic and nobody has committed. See
        `checkpoint.requests.CleanStore`."""

    def commit(self, committables: Sequence[StoreCommittable], incarnation: int, origin: str) -> bool:
        """Commit all committables of the sink at one checkpoint, oldest first; -> whether any was committed now.

        All of *committables* and their ledger are one step, unless the committer `CommitsBySubtask`. May be repeated
        after any outcome, by any process. See `checkpoint.requests.CommitStaged`.
        """

    def close(self) -> None:
        """Close the connection."""


class CommitsBySubtask(ABC):
    """A committer whose ledger has an entry for each subtask. Its leader asks for one committable at a time: an answer,
    a refusal or an accepted loss is one subtask's."""

    def commit(self, committables: Sequence[StoreCommittable], incarnation: int, origin: str) -> bool:
        """See `Committer.commit`: one after the other, so a repeated call skips those that are committed."""
        outcomes = [self.commit_one(committable, incarnation, origin) for committable in committables]
        return any(outcomes)

    @abstractmethod
    def commit_one(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        """Commit in one step with the ledger entry; -> whether it was now; False: it had been."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """Output that waits in a store itself, outside of the checkpoint topic, as the store lists it."""

    name: str
    """A committable has it in its body."""
    subtask: int
    incarnation: int
    attempt: int
    checkpoint: int | None = None
    """The one at whose barrier it was cut; None: the store does not show it."""
    since_ms: int | None = None
    """The time of staging; None: the store does not show it."""


@dataclass(frozen=True, kw_only=True)
class StoreView:
    """A sink's store as a look shows it."""

    incarnation: int = 0
    """See `SinkLedger`, as for the next two."""
    origin: str = ""
    ledger: Mapping[int, int] = field(default_factory=dict)
    """By subtask, the checkpoint whose output is in the store."""
    waiting: tuple[SetAside, ...] = ()
    problem: str = ""
    """Why the store does not take what the sink writes; empty: it does."""
    risk: str = ""
    """What may remove waiting output in the store by itself, as a sentence without its full stop; empty: nothing."""
    growth: str = ""
    """What grows with each checkpoint and has become too much, as a predicate of the store; empty: nothing."""

    @classmethod
    def of(
        cls, ledger: SinkLedger, *, waiting: tuple[SetAside, ...] = (), problem: str = "", risk: str = "",
        growth: str = "",
    ) -> StoreView:  # fmt: skip
        """The view of a store with *ledger*."""
        return cls(
            incarnation=ledger.incarnation, origin=ledger.origin, ledger=dict(ledger.checkpoints), waiting=waiting,
            problem=problem, risk=risk, growth=growth,
        )  # fmt: skip


@runtime_checkable
class Inspectable(Protocol):
    """A committer whose store can be looked at beside a run, without changes, locks or waits."""

    def look(self) -> StoreView | None:
        """None: this store cannot be looked at."""


@runtime_checkable
class Hindered(Protocol):
    """A committer that repeats failed requests within a call, and can name the last of them meanwhile."""

    @property
    def failure(self) -> str:
        """The text of the last failed request of the call under way; empty: there is none. For any thread."""


@dataclass(frozen=True, kw_only=True)
class CommitterContext:
    """The arguments of a committer, beside the description of its sink."""

    pipeline: str
    sink: str
    type: Any
    """The records' type."""
    blocks: Blocks
    """Reads what was staged in the checkpoint topic."""
    client: ClientConfig | None = None
    """The cluster of the checkpoints, for a sink that keeps its ledger there; None: there is none."""
    letters: str = ""
    """The topic of the sink's dead letters, for records that the store refuses one by one; empty: there is none."""
    letter_limits: DeadLetterLimits | None = None
    note: Callable[[str], None] = lambda text: None
    """Called with a sentence for the operator."""


@runtime_checkable
class Committing(Protocol):
    """The description of a sink whose output the leader commits to a store."""

    @property
    def stages(self) -> bool:
        """Whether its writers stage output; else they write to the store themselves, which is only checked."""

    def open_committer(self, context: CommitterContext) -> Committer:
        """Its committer; the store is not asked yet."""
