"""The seam between a leader and a sink whose store keeps a ledger: who commits what its writers have set aside.

Invariants: the ledger lies in the store, is changed in one step with the data, and is what decides; a committer can be
asked the same again by any process, at any time, and does it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.checkpoint.store.storage import Blocks


class Committer(Protocol):
    """Of one sink. For one thread at a time.

    All raise `StoreUnavailable` where the store does not answer, from which nothing follows, and `StoreError` where it
    refuses; `fence` and `commit` also `ForeignLedger`, `LedgerBehind` and `Fenced`.
    """

    @property
    def kind(self) -> str:
        """The `StoreCommittable.kind` that it commits."""

    def check(self) -> None:
        """Raise unless the store, as it is, can take what the sink writes. Nothing is changed but what the sink is to
        create."""

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """Let no older incarnation commit any more; -> by subtask, the checkpoint in the ledger. See
        `checkpoint.requests.FenceStore`."""

    def clean(self, incarnation: int, attempt: int) -> None:
        """What older attempts than that one have set aside outside of the checkpoint topic, and nobody has committed,
        goes. See `checkpoint.requests.CleanStore`."""

    def commit(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        """-> whether it was committed now; False: it had been. See `checkpoint.requests.CommitStaged`."""

    def close(self) -> None:
        """Let go of the connection."""


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
