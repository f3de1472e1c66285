"""The seam between a leader and a sink whose store keeps a ledger: who commits what its writers have set aside.

Invariants: the ledger lies in the store, is changed in one step with the data, and is what decides; a committer can be
asked the same again by any process, at any time, and does it once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import StoreCommittable


class Committer(Protocol):
    """Of one sink. For one thread at a time.

    All raise `StoreUnavailable` where the store does not answer, from which nothing follows, and `StoreError` where it
    refuses; `fence` and `commit` also `ForeignLedger`, `LedgerBehind` and `Fenced`.
    """

    @property
    def kind(self) -> str:
        """The `StoreCommittable.kind` that it commits."""

    @property
    def ledger(self) -> str:
        """Where its ledger is, and what of it is the sink's: for whoever has to look at it, or to empty it. It has no
        secret; nothing is asked for it."""

    def check(self) -> None:
        """Raise unless the store, as it is, can take what the sink writes. Nothing is changed but what the sink is to
        create."""

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """Let no older incarnation commit any more; -> by subtask, the checkpoint in the ledger. See
        `checkpoint.requests.FenceStore`."""

    def clean(self, incarnation: int, attempt: int) -> None:
        """What older attempts than that one have set aside outside of the checkpoint topic, and nobody has committed,
        goes. See `checkpoint.requests.CleanStore`."""

    def commit(self, committables: Sequence[StoreCommittable], incarnation: int, origin: str) -> bool:
        """Commit what the sink has for one checkpoint, oldest first; -> whether any of it was committed now.

        A store commits all of *committables* and their ledger in one step, unless it `CommitsBySubtask`. May be called
        again after any outcome, by any process. See `checkpoint.requests.CommitStaged`.
        """

    def close(self) -> None:
        """Let go of the connection."""


class CommitsBySubtask(ABC):
    """A committer whose ledger has an entry for each subtask: its leader asks for one committable at a time, so that an
    answer, a refusal or an accepted loss is that of one subtask."""

    def commit(self, committables: Sequence[StoreCommittable], incarnation: int, origin: str) -> bool:
        """See `Committer.commit`: one after the other, so that a call that is repeated skips those that are there."""
        outcomes = [self.commit_one(committable, incarnation, origin) for committable in committables]
        return any(outcomes)

    @abstractmethod
    def commit_one(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        """-> whether it was committed now, in one step with its entry; False: it had been."""


@dataclass(frozen=True, kw_only=True)
class SetAside:
    """What waits in a store itself, outside of the checkpoint topic, as the store lists it."""

    name: str
    """As a committable names it in its body, or tells it apart."""
    subtask: int
    incarnation: int
    attempt: int
    checkpoint: int | None = None
    """At whose barrier it was cut; None: the store does not show it."""
    since_ms: int | None = None
    """When it was set aside, likewise."""


@dataclass(frozen=True, kw_only=True)
class StoreView:
    """A sink's store as a look shows it."""

    incarnation: int = 0
    """The newest that has fenced; 0: none."""
    origin: str = ""
    """The id of the checkpoint topic that the ledger was begun for; empty: there is no ledger yet."""
    ledger: Mapping[int, int] = field(default_factory=dict)
    """By subtask, the checkpoint whose output is in the store."""
    waiting: tuple[SetAside, ...] = ()
    problem: str = ""
    """Why the store, as it is, does not take what the sink writes; empty: nothing stands in the way."""


@runtime_checkable
class Inspectable(Protocol):
    """A committer whose store can be looked at beside a run: nothing is changed, locked or waited for."""

    def look(self) -> StoreView | None:
        """None: this store cannot show itself so."""


@runtime_checkable
class RollsBack(Protocol):
    """A committer of what holds something in its store while it waits, as prepared transactions hold locks."""

    def roll_back(self, names: Collection[str], incarnation: int, origin: str) -> list[str]:
        """Roll back those of *names* that wait; -> them. Nobody may be able to decide on them any more: who made them
        has been fenced, as have all up to *incarnation*. Changes nothing where the ledger is not of *origin*."""


@dataclass(frozen=True, kw_only=True)
class CommitterContext:
    """What a committer is made of, beside the description of its sink."""

    pipeline: str
    sink: str
    type: Any
    """Of the records."""
    blocks: Blocks
    """Reads what was set aside in the checkpoint topic."""


@runtime_checkable
class Committing(Protocol):
    """The description of a sink whose output the leader commits to a store."""

    @property
    def stages(self) -> bool:
        """Whether its writers set anything aside; else they write to the store themselves, which is only checked."""

    def open_committer(self, context: CommitterContext) -> Committer:
        """Its committer; nothing is asked yet."""
